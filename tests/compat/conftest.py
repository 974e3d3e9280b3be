"""Makes the packages of compat/sglang-cpu importable, and skips this folder where the real ones are installed."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
SOURCE = Path(__file__).resolve().parents[2] / "compat" / "sglang-cpu" / "src"

if importlib.util.find_spec("eagle_sglang_cpu") is None:
    sys.path.insert(0, str(SOURCE))

from eagle_sglang_cpu.conflicts import conflict_message  # noqa: E402

collect_ignore_glob = ["test_*.py"] if conflict_message() else []


@pytest.fixture(scope="module", params=["native", "torch"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the tests of a module once on the C++ functions and once on the torch path.

    Where EAGLE_KERNELS=torch asks for no C++, the first are skipped; where the C++ does not build, they fail.
    """
    from eagle_sglang_cpu import cache_index, native, tree_links

    with pytest.MonkeyPatch.context() as monkeypatch:
        if request.param == "torch":
            for module in (cache_index, tree_links):
                monkeypatch.setattr(module, "function", lambda name: None)
        elif os.environ.get("EAGLE_KERNELS") == "torch":
            pytest.skip("EAGLE_KERNELS=torch: there is no native code to test")
        else:
            assert native.backend() == "native", "the C++ functions were not built; the log has the compiler's error"
        yield request.param
