"""The versions of installed libraries of kernels, to which records and measured costs belong."""

from __future__ import annotations

from collections.abc import Iterator

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
