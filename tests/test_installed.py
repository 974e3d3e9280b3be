"""The versions of installed libraries of kernels, to which records and measured costs belong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_plugin.common import installed


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    installed.kernel_libraries.cache_clear()
    yield
    installed.kernel_libraries.cache_clear()


def test_each_library_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"flashinfer-python": "0.7.2", "sglang-kernel": "0.4.10"}

    def version(name: str) -> str:
        if name not in there:
            raise installed.importlib.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(installed.importlib.metadata, "version", version)
    assert installed.kernel_libraries() == "flashinfer-python 0.7.2 sglang-kernel 0.4.10"
    there["flashinfer-python"] = "0.7.3"
    assert installed.kernel_libraries() == "flashinfer-python 0.7.2 sglang-kernel 0.4.10"  # once per process
    installed.kernel_libraries.cache_clear()
    assert "flashinfer-python 0.7.3" in installed.kernel_libraries()


def test_no_message_advises_a_package_that_no_index_has() -> None:
    """`install_command` says where eagle-plugin is installed from."""
    assert installed.install_command("data").startswith("pip install '.[data]' in the folder of eagle-plugin")
    assert installed.install_command(python="/x/python").startswith("/x/python -m pip install . in the folder")
    root = Path(installed.__file__).parents[2]
    sources = [*(root / "eagle_plugin").rglob("*.py"), *(root / "compat/sglang-cpu/src").rglob("*.py")]
    sources += [root / "setup.py", root / "environments/make.sh", *(root / "tools").rglob("*.py")]
    advice = re.compile(r"pip install (?:'|\")?eagle[-_]plugin")
    assert [str(path) for path in sources if advice.search(path.read_text("utf-8"))] == []
