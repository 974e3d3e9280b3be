from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import on_device
import pytest
from cuda_emulation import CSRC, build_emulated

# what `path` can switch
from eagle_plugin.kernels import (  # noqa: F401
    accepted_path,
    attention,
    kv,
    loader,
    lookup,
    penalties,
    round_start,
    sampling,
    tree,
)


@pytest.fixture(scope="session", autouse=True)
def _native_library() -> None:
    """These tests compare the native kernels with the oracles: without a native library they prove nothing.

    So a machine without a working compiler fails here. EAGLE_KERNELS=torch says that none is wanted.
    """
    if os.environ.get("EAGLE_KERNELS") == "torch":
        pytest.skip("EAGLE_KERNELS=torch: there are no native kernels to test")
    if loader.backend((os.environ.get("EAGLE_TEST_DEVICE") or "cpu").partition(":")[0]) != "native":
        pytest.fail(
            "the native kernels were not built (the log has the compiler's error), wanted a library to test: install "
            "g++, or set EAGLE_KERNELS=torch to skip tests/kernels",
            pytrace=False,
        )


@pytest.fixture(scope="session", autouse=True)
def _on_device() -> Iterator[None]:
    """Run the kernels on the device EAGLE_TEST_DEVICE, if it names one (`make gpu`)."""
    with pytest.MonkeyPatch.context() as patch:
        if device := os.environ.get("EAGLE_TEST_DEVICE"):
            on_device.patch(patch, device)
        yield


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library of the CUDA kernels that runs on the CPU."""
    return build_emulated(CSRC, tmp_path_factory.mktemp("emulated"))


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test once on the native kernels and once on the torch path."""
    if request.param == "torch":
        for name, module in list(sys.modules.items()):
            if name.startswith("eagle_plugin.kernels.") and module is not loader and hasattr(module, "function"):
                monkeypatch.setattr(module, "function", lambda *_: None)
    return request.param
