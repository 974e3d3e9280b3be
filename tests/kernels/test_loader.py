"""Where the native kernels come from, and whose threads they run on."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple, NoReturn, TextIO

import pytest

from eagle_plugin.kernels import build, loader

SAY = """
import torch
from eagle_plugin.kernels import loader, tree
links = tree.sibling_links(torch.tensor([[-1, 0, 0]], dtype=torch.int32))
print(loader.backend(), [x.tolist()[0] for x in links])
"""


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run(code: str, **env: str) -> Done:
    """What a process prints that has these variables and no library yet: a fork, for to import torch takes seconds."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            _become(code, env, out, err)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read())
    return Done(status, *printed)


def _become(code: str, env: dict[str, str], out: TextIO, err: TextIO) -> NoReturn:
    """Run `code` as the rest of this process."""
    status = 1
    try:
        sys.stdout, sys.stderr = out, err
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        logging.getLogger().handlers.clear()  # pytest's
        os.environ |= env
        loader.open_library.cache_clear()
        loader.function.cache_clear()
        exec(code, {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        out.flush()
        err.flush()
        os._exit(status)  # without what pytest does in the end


def test_torch_mode_needs_no_library() -> None:
    assert run(SAY, EAGLE_KERNELS="torch").stdout.split("\n")[0] == "torch [[1, -1, -1], [-1, 2, -1]]"


def test_without_a_compiler_auto_falls_back_and_jit_refuses(tmp_path: Path) -> None:
    alone = dict(EAGLE_LIBRARY="", EAGLE_CACHE_DIR=str(tmp_path), CXX="", PATH=str(tmp_path))
    if loader.kernel_library().shipped() is None:
        done = run(SAY, EAGLE_KERNELS="auto", **alone)
        assert done.stdout.split("\n")[0] == "torch [[1, -1, -1], [-1, 2, -1]]"
        assert "no C++ compiler found" in done.stderr
        aot = run(SAY, EAGLE_KERNELS="aot", **alone)
        assert aot.returncode
        assert "EAGLE_KERNELS=aot but" in aot.stderr
    jit = run(SAY, EAGLE_KERNELS="jit", **alone)
    assert jit.returncode
    assert "no C++ compiler found, wanted g++, c++ or clang++ on PATH or $CXX: install g++" in jit.stderr


def test_a_broken_compiler_falls_back_and_leaves_no_library(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such thing >&2\nexit 1\n')
    compiler.chmod(0o755)
    env = dict(EAGLE_LIBRARY="", EAGLE_CACHE_DIR=str(tmp_path / "cache"), CXX=str(compiler))
    done = run(SAY, EAGLE_KERNELS="jit", **env)
    assert done.returncode
    assert "no such thing" in done.stderr
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_cuda_tensors_without_a_library_run_on_torch(tmp_path: Path) -> None:
    """nvcc that fails, or none: one warning, then the torch oracles; aot and jit refuse instead."""
    code = """
import torch
torch.cuda.get_device_capability = lambda: (9, 0)
from eagle_plugin.kernels import loader
print(loader.backend("cuda"), loader.function("grow_level", "cuda"), loader.function("grow_level", "meta"))
"""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such GPU >&2\nexit 1\n')
    nvcc.chmod(0o755)
    env = dict(EAGLE_CACHE_DIR=str(tmp_path / "cache"), CUDA_HOME=str(tmp_path))
    if loader.kernel_library("cuda").shipped() is None:
        done = run(code, EAGLE_KERNELS="auto", **env)
        assert done.stdout == "torch None None\n", done.stderr
        assert "no native kernels for cuda tensors, the slower torch path serves" in done.stderr
        assert "code=sm_90" in done.stderr  # built for the GPU at hand
        aot = run(code, EAGLE_KERNELS="aot", **env)
        assert aot.returncode
        assert "has no libeagle_cuda.so: reinstall, or use EAGLE_KERNELS=auto" in aot.stderr
    jit = run(code, EAGLE_KERNELS="jit", **env)
    assert jit.returncode
    assert "no such GPU" in jit.stderr
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel library 'rocm' is unknown, wanted cpu or cuda"):
        loader.load("rocm")


def test_an_unknown_mode_is_refused() -> None:
    done = run(SAY, EAGLE_KERNELS="fast")
    assert "EAGLE_KERNELS is 'fast', wanted one of auto, aot, jit, torch: change or unset it" in done.stderr


def test_the_loader_picks_by_instruction_set() -> None:
    assert build.cpu_library(build.AVX512 | {"sse2"}) == "libeagle_cpu_v4.so"
    assert build.cpu_library(build.AVX512 - {"avx512vl"}) == "libeagle_cpu_v3.so"
    assert build.cpu_library(frozenset({"sse2", "avx"})) is None


def test_the_threads_are_torchs() -> None:
    """One OpenMP runtime in the process, and it is the one that our kernels found."""
    code = """
import torch
from eagle_plugin.kernels import loader
get = loader.load().get_function
maps = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(sorted(m for m in maps if m.rsplit("/", 1)[-1].startswith(("libgomp", "libomp", "libiomp"))))
print([get("openmp_library")()])
torch.set_num_threads(2)
print(get("max_threads")())
torch.set_num_threads(1)
print(get("max_threads")())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    runtimes, ours, two, one = done.stdout.split("\n")[:4]
    real = [os.path.realpath(path) for path in eval(ours)]
    assert [os.path.realpath(path) for path in eval(runtimes)] == real
    assert (two, one) == ("2", "1")


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.matrix  # a build of everything
def test_the_avx2_library_compiles_and_agrees(tmp_path: Path) -> None:
    """The library for CPUs without AVX-512 has 8 lanes instead of 16: the attention tests run on it too."""
    csrc = loader.source_folder()
    assert csrc is not None
    library = tmp_path / "libeagle_cpu_v3.so"
    build.build_cpu(csrc, library, "x86-64-v3", extra=["-O1"])
    tests = [str(Path(__file__).with_name(f"test_{name}_kernels.py")) for name in ("attention", "tree")]
    env = os.environ | dict(EAGLE_LIBRARY=str(library), EAGLE_TEST_EXAMPLES="15", OMP_NUM_THREADS="1", EAGLE_KERNELS="")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("mode", ["auto", "aot"])
def test_kernels_are_built_where_the_shipped_ones_are_for_other_gpus(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, built = tmp_path / "libgpu.so", tmp_path / "built.so"
    shipped.touch()

    def probe(module: str, device: str) -> None:
        if module == str(shipped):
            raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setenv("EAGLE_KERNELS", mode)
    monkeypatch.setattr(loader.tvm_ffi, "load_module", lambda path: path)
    monkeypatch.setattr(loader, "probe", probe)
    monkeypatch.setattr(loader, "first_use_build", lambda library: built)
    monkeypatch.setattr(loader, "wrap_module", lambda module: module)  # whatever another test has installed
    library = loader.Library("gpu", "cuda", tmp_path, "kernels of a test", shipped_in=tmp_path)
    if mode == "auto":
        assert loader.open_library.__wrapped__(library) == str(built)
    else:
        with pytest.raises(RuntimeError, match="no kernel image"):
            loader.open_library.__wrapped__(library)
