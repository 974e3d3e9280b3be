"""Code of a decode round on fake CUDA tensors, on a machine without a GPU.

torch's FakeTensorMode computes devices, dtypes and shapes, no values. An operation that mixes CPU and CUDA tensors,
that reads a value on the host, or whose result has a shape that depends on values, raises. The native kernels are
replaced by functions that compute nothing and refuse what the CUDA library refuses: tensors elsewhere, or with gaps.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from eagle_plugin.kernels import attention, gated_delta_trees, kv, loader

CUDA = torch.device("cuda")
# Tensors that may have gaps, by kernel and place among its arguments (`check_rows`, `check_cache` in csrc/bindings).
MAY_HAVE_GAPS = {
    "topk_log_softmax": {0},
    "verify_tree": {2},
    "store_kv": {0, 1, 3, 4},
    "store_kv (Triton)": {0, 1, 3, 4},
    "tree_attention (Triton)": {1, 2},
    "penalize_nodes": {0},
    "start_round": {2},
}


def build_guard(folder: Path) -> Path:
    """Compile device_guard.cc, which a torch without CUDA needs once per process, by `torch.ops.load_library`."""
    source = Path(__file__).parents[1] / "kernels/cuda/device_guard.cc"
    library = folder / "device_guard.so"
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "no C++ compiler: install g++"
    # Not from torch.utils.cpp_extension: it imports setuptools, which refuses to come after distutils.
    home = Path(torch.__file__).parent
    flags = ["-std=c++20", "-shared", "-fPIC", "-O1", f"-I{home / 'include'}"]
    link = [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-lc10"]
    subprocess.run([compiler, *flags, str(source), *link, "-o", str(library)], check=True)
    return library


class FakeLibrary:
    """The native CUDA library as the Python functions see it; `launched` has the name of every launch."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def get_function(self, name: str) -> Callable[..., None]:
        """A kernel that checks the tensors that it is given."""

        def launch(*arguments: Any) -> None:
            for place, tensor in enumerate(tree_leaves(arguments)):
                if isinstance(tensor, torch.Tensor):
                    require_cuda(f"{name}, argument {place}", tensor)
                    if place not in MAY_HAVE_GAPS.get(name, ()) and not tensor.is_contiguous():
                        raise ValueError(f"{name}, argument {place}: strides {tensor.stride()}, wanted contiguous")
            self.launched.append(name)

        return launch


def require_cuda(name: str, tensor: torch.Tensor) -> None:
    """TypeError for a tensor that is not on the GPU."""
    if tensor.device.type != "cuda":
        raise TypeError(f"{name} {list(tensor.shape)} is on {tensor.device}, wanted a CUDA device")


def all_on_cuda(*values: Any) -> bool:
    """Whether all tensors among these values are on the GPU."""
    return all(x.device.type == "cuda" for x in tree_leaves(values) if isinstance(x, torch.Tensor))


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    """Inside the block new tensors are fake, and kernels for CUDA tensors are those of the yielded library."""
    library = FakeLibrary()
    with monkeypatch.context() as patch:
        patch.setattr(loader, "load", lambda kind="cpu": library)
        patch.setattr(attention, "_triton", lambda: _launch(library, "tree_attention (Triton)"))
        patch.setattr(kv, "_triton", lambda: _launch(library, "store_kv (Triton)"))
        patch.setattr(gated_delta_trees, "_triton_kernels", lambda: _gated_delta(library))
        loader.function.cache_clear()
        try:
            with FakeTensorMode(allow_non_fake_inputs=False):
                yield library
        finally:
            loader.function.cache_clear()


def _launch(library: FakeLibrary, name: str) -> Callable[..., None]:
    def launch(*tensors: torch.Tensor, **options: Any) -> None:
        scales = [x for x in options.values() if isinstance(x, torch.Tensor)]
        library.get_function(name)(*tensors, *scales)

    return launch


def _gated_delta(library: FakeLibrary) -> Any:
    """The kernels of `triton_gated_delta`, which take rows and caches with gaps."""

    def launches(name: str) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            for place, tensor in enumerate(tree_leaves(arguments)):
                if isinstance(tensor, torch.Tensor):
                    require_cuda(f"{name}, argument {place}", tensor)
            library.launched.append(f"{name} (Triton)")

        return launch

    return SimpleNamespace(attend_trees=launches("attend_trees"), commit_trees=launches("commit_trees"))


class TakenRows:
    """In place of a collector of hidden states: keeps the rows that it is given of the requests `names`."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.rows = names, list[Any]()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __len__(self) -> int:
        return len(self.names)

    def add(self, rows: Any) -> None:
        self.rows.append(rows)
