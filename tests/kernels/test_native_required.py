"""The tests of this folder must not vanish: without a native library they fail, unless that was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_plugin.kernels import attention, kv, loader, sampling, tree

SOME_TEST = Path(__file__).with_name("test_kv_kernels.py")  # any file of this folder that skips nothing


def run_a_test(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run one file of this folder where the only compiler is one that always fails."""
    compiler = folder / "g++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such thing >&2\nexit 1\n')
    compiler.chmod(0o755)
    broken = {"EAGLE_LIBRARY": "", "EAGLE_CACHE_DIR": str(folder / "cache"), "CXX": str(compiler)}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(SOME_TEST)]
    return subprocess.run(command, env=os.environ | broken | env, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(loader.kernel_library().shipped() is not None, reason="a shipped library needs no compiler")
def test_a_failed_build_fails_the_tests(tmp_path: Path) -> None:
    done = run_a_test(tmp_path, EAGLE_KERNELS="auto")
    assert done.returncode == 1, done.stdout
    assert "the native kernels were not built" in done.stdout
    assert "skipped" not in done.stdout and "passed" not in done.stdout


def test_they_are_skipped_where_torch_was_asked_for(tmp_path: Path) -> None:
    done = run_a_test(tmp_path, EAGLE_KERNELS="torch")
    assert done.returncode == 0, done.stdout
    assert "EAGLE_KERNELS=torch: there are no native kernels to test" in done.stdout
    assert "passed" not in done.stdout


def test_the_fixture_switches_every_subject(path: str) -> None:
    """`path` finds the modules by itself: a new one with a native kernel is on it too."""
    for module in (attention, kv, sampling, tree):
        assert (module.function is loader.function) == (path == "native")
