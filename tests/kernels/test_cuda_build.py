"""csrc/cuda as nvcc sees it: it compiles for several generations of GPUs, loads without one, and stays in registers."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import tvm_ffi

from eagle_plugin.kernels import build, loader

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not build.find_nvcc(), reason="needs nvcc")]

CSRC = Path(__file__).parents[2] / "csrc"
EXPORT = re.compile(r"^TVM_FFI_DLL_EXPORT_TYPED_FUNC\((\w+),", re.MULTILINE)
KERNELS = [name for path in sorted((CSRC / "bindings").glob("*.h")) for name in EXPORT.findall(path.read_text())]


class Library(NamedTuple):
    path: Path
    archs: list[str]


# No source looks at the generation: what compiles for one compiles for all, and each needs nearly the same registers.
@pytest.fixture(
    scope="module", params=[["90"], pytest.param(["80", "90", "100"], marks=pytest.mark.matrix)], ids=" ".join
)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    path = tmp_path_factory.mktemp("cuda") / "libeagle_cuda.so"
    build.build_cuda(CSRC, path, request.param)
    return Library(path, request.param)


def find_cuobjdump() -> str | None:
    """Return NVIDIA's tool: beside nvcc, from PATH, or the one that Triton carries."""
    places = [str(Path(build.find_nvcc() or "").resolve().parent), None]
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        places.append(str(Path(triton.origin).parent / "backends/nvidia/bin"))
    return next((found for place in places if (found := shutil.which("cuobjdump", path=place))), None)


def test_it_loads_without_a_gpu_and_refuses_cpu_tensors(library: Library) -> None:
    module = tvm_ffi.load_module(str(library.path))
    assert {"topk_log_softmax", "verify_tree", "store_kv"} <= set(KERNELS)
    assert all(module.get_function(name) for name in KERNELS)
    with pytest.raises(ValueError, match=r"parents is not on a CUDA device: move it with \.cuda\(\)"):
        loader.probe(module, "cpu")


def test_no_kernel_spills(library: Library) -> None:
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:  # it comes with the CUDA toolkit and with Triton: only a machine with neither is let off
        pytest.skip("needs cuobjdump")
    command = [cuobjdump, "--dump-resource-usage", str(library.path)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {f"sm_{arch}" for arch in library.archs} == set(re.findall(r"sm_\d+", usage))
    kernels = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", usage)
    assert len(kernels) >= len(library.archs) * len(KERNELS)
    for name, registers, stack in kernels:
        assert int(registers) <= 64, name  # 1024 threads per block
        bound = 128 if "walk_kernel" in name else 16  # a walk holds the shares that the refusals of a node have taken
        assert int(stack) <= bound, name


def test_no_sum_in_shared_memory_is_a_loop(library: Library) -> None:
    """An atomic sum of 64 bits in shared memory compiles to a loop: slow where many meet."""
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("needs cuobjdump")
    code = subprocess.run([cuobjdump, "-sass", str(library.path)], capture_output=True, text=True, check=True).stdout
    assert "ATOMS.ADD" in code
    assert not re.findall(r"ATOMS\.CAS\S*", code)
