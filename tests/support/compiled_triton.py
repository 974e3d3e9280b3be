"""Compiles Triton's kernels for GPUs that this machine need not have."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SHARED = 99 * 1024  # bytes per block, the smallest limit since sm_80


class Compiled(NamedTuple):
    shared: int
    stack: int
    ptx: str


def compile_for(cc: int, kernel, types: dict[str, str], constants: dict, **options: int) -> Compiled:
    """Compile with the hints that a launch on torch tensors gives: addresses and strides divisible by 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    hinted = [i for i, name in enumerate(names) if name.endswith(("_ptr", "_stride")) and name not in constants]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in hinted},
    )
    found = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options)
    return Compiled(found.metadata.shared, stack_of(found.asm["cubin"]), found.asm["ptx"])


def stack_of(cubin: bytes) -> int:
    """Return the local memory of a thread in bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", usage)
    assert found, usage
    return int(found[1])
