"""The C++ functions of the compat distribution: in the wheel as sources, built on first use, clean under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from eagle_sglang_cpu import native
from sanitizers import needs_sanitizers, sanitized_environment

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTION = ROOT / "compat" / "sglang-cpu"
SHOW = "from eagle_sglang_cpu import native; print(native.LIBRARY.sources, native.backend())"


def run(code: str, *folders: Path, **env: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": ":".join(map(str, (*folders, ROOT)))} | env
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(os.environ.get("EAGLE_KERNELS") == "torch", reason="asked for no native code")
def test_an_installed_wheel_has_the_sources_and_builds_them(tmp_path: Path) -> None:
    copy, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(DISTRIBUTION, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    build = "from setuptools import build_meta; build_meta.build_wheel('..')"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    sources = site / "eagle_sglang_cpu" / "csrc"
    assert {path.name for path in sources.iterdir()} == {"cache_index.cc", "elementwise.cc", "tree_links.cc"}
    # the same sources as the checkout's, hence the same build in the cache
    assert run(SHOW, site, EAGLE_KERNELS="auto").stdout == f"{sources} native\n"


def test_torch_runs_where_the_sources_are_not_built(tmp_path: Path) -> None:
    source = DISTRIBUTION / "src"
    nothing = {"EAGLE_SGLANG_CPU_LIBRARY": "", "EAGLE_CACHE_DIR": str(tmp_path), "CXX": "", "PATH": str(tmp_path)}
    auto = run(SHOW, source, EAGLE_KERNELS="auto", **nothing)
    assert auto.stdout.endswith(" torch\n")
    assert "no native functions for SGLang on a CPU, the slower torch path serves: no C++ compiler found" in auto.stderr
    assert run(SHOW, source, EAGLE_KERNELS="jit", **nothing).returncode
    assert run(SHOW, source, EAGLE_KERNELS="aot").stdout.endswith(" torch\n")  # nothing is shipped


@needs_sanitizers
@pytest.mark.matrix
def test_the_functions_pass_under_sanitizers(tmp_path: Path) -> None:
    tests = [str(Path(__file__).with_name(f"test_{name}.py")) for name in ("elementwise", "cache_names", "tree_names")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not torch", *tests]
    environment = sanitized_environment(native.LIBRARY, tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
