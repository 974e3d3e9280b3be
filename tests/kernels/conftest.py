from __future__ import annotations

import pytest

from eagle_plugin.kernels import attention, kv, loader, tree, tree_links, verify


@pytest.fixture(scope="session", autouse=True)
def _native_library() -> None:
    """These tests compare the native kernels with the oracles: without a compiler there is nothing to compare."""
    if loader.backend() != "native":
        pytest.skip("no native kernels: no C++ compiler at hand, or EAGLE_KERNELS=torch")


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test once on the native kernels and once on the torch path."""
    if request.param == "torch":
        for module in (attention, kv, tree, tree_links, verify):
            monkeypatch.setattr(module, "function", lambda *_: None)
    return request.param
