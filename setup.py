"""Builds the native kernels into eagle_plugin/lib; without torch, through the C ABI of tvm-ffi.

csrc/ and examples/ are copied into the package: kernels are built from csrc/ at first use where no library fits, and
`eagle-plugin demo` asks the questions of examples/. The heads there are a distribution of their own.

EAGLE_BUILD       auto (default): CPU kernels if there is a C++ compiler, CUDA kernels if there is nvcc; after a failed
                  build the package still works: it builds on first use, or runs the slower torch path
                  cpu | cuda: that one, or fail
                  none: sources only
EAGLE_CUDA_ARCHS  GPU architectures to build for (default "80 90 100 120"); the first is embedded as PTX too
"""

import os
import platform
import runpy
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).parent
CSRC = ROOT / "csrc"
COPIED = ("csrc", "examples")  # beside the package in a checkout, inside it in a wheel
OF_HEADS = shutil.ignore_patterns("heads")  # examples/heads has a pyproject.toml of its own
MODES = ("auto", "cpu", "cuda", "none")
MODE = os.environ.get("EAGLE_BUILD") or "auto"
if MODE not in MODES:
    sys.exit(f"EAGLE_BUILD is {MODE!r}, wanted one of {', '.join(MODES)}: change or unset it")
BUILD = runpy.run_path(str(ROOT / "eagle_plugin/kernels/build.py"))  # importing the package would need torch


class BuildWithKernels(build_py):
    def run(self) -> None:
        package = Path(self.build_lib) / "eagle_plugin"
        shutil.rmtree(package, ignore_errors=True)  # pip builds in the tree: a stale build/ would leak into the wheel
        super().run()
        if self.editable_mode:  # a checkout has csrc/ beside the package and builds on first use
            return
        for folder in COPIED:
            shutil.copytree(ROOT / folder, package / folder, ignore=OF_HEADS, dirs_exist_ok=True)
        libraries = package / "lib"
        libraries.mkdir(parents=True, exist_ok=True)
        if MODE in ("auto", "cpu") and platform.machine() in ("x86_64", "AMD64"):
            for level in ("v3", "v4"):  # AVX2 and AVX-512; the loader picks
                output = libraries / f"libeagle_cpu_{level}.so"
                self.attempt("cpu", BUILD["build_cpu"], CSRC, output, f"x86-64-{level}")
        if MODE == "cuda" or (MODE == "auto" and any((CSRC / "cuda").glob("*.cu"))):
            archs = (os.environ.get("EAGLE_CUDA_ARCHS") or "80 90 100 120").split()
            self.attempt("cuda", BUILD["build_cuda"], CSRC, libraries / "libeagle_cuda.so", archs)

    def attempt(self, kind, build, *args) -> None:
        try:
            wanted = args[2] if kind == "cpu" else ", ".join(f"sm_{arch}" for arch in args[2])
            print(f"building {args[1].name} for {wanted}", flush=True)  # some minutes for all GPUs
            build(*args)
            print(f"built {args[1].name}", flush=True)
        except (OSError, RuntimeError, ImportError) as error:
            if kind == MODE:
                raise
            print(f"no {args[1].name}, the package is built without it: {error}", file=sys.stderr, flush=True)

    def get_outputs(self, include_bytecode=1):
        package = Path(self.build_lib) / "eagle_plugin"
        extra = [str(p) for folder in (*COPIED, "lib") for p in (package / folder).rglob("*") if p.is_file()]
        return super().get_outputs(include_bytecode) + extra


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return MODE != "none"


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]  # the libraries do not use Python's ABI


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
