"""Refusing an environment with the real packages, and refusing uses that a text-only CPU environment cannot serve."""

import subprocess
import sys
from pathlib import Path

import pytest
from eagle_sglang_cpu import conflicts

DISTRIBUTION = Path(__file__).resolve().parents[2] / "compat" / "sglang-cpu"


def run(code: str, *folders: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = ":".join(map(str, (*folders, DISTRIBUTION / "src", DISTRIBUTION.parents[1])))
    variables = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "EAGLE_KERNELS": "torch"} | env
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


@pytest.fixture(params=conflicts.RIVALS)
def rival(request, tmp_path):
    """A folder in which the distribution seems installed, and its name."""
    folder = tmp_path / f"{request.param.replace('-', '_')}-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {request.param}\nVersion: 9.9\n")
    return tmp_path, request.param


def test_imports_stop_with_the_fix(rival):
    folder, name = rival
    (line,) = run("try: import sgl_kernel\nexcept ImportError as e: print(e)", folder).stdout.splitlines()
    assert f"{name} 9.9 is installed" in line and f"pip uninstall {name}" in line


def test_the_entry_point_stops_the_server(rival):
    folder, name = rival
    code = "import eagle_sglang_cpu\ntry: eagle_sglang_cpu.register()\nexcept Exception: pass\nprint('served on')"
    result = run(code, folder)
    assert result.returncode != 0 and result.stdout == ""
    assert result.stderr.startswith("error: eagle-plugin-sglang-cpu") and f"{name} 9.9 is installed" in result.stderr


def test_the_build_stops(rival):
    folder, name = rival
    code = f"import os, runpy; os.chdir({str(DISTRIBUTION)!r}); runpy.run_path('setup.py', run_name='__main__')"
    result = run(code, folder)
    assert result.returncode != 0 and f"{name} 9.9 is installed" in result.stderr


def test_nothing_is_refused_without_a_rival():
    result = run("import sgl_kernel, eagle_sglang_cpu.conflicts as c; print(c.conflict_message())")
    assert result.stdout == "None\n", result.stderr


def test_the_entry_point_does_nothing_on_other_devices():
    code = "import eagle_sglang_cpu as e, sys; e.register(); print('eagle_sglang_cpu.hooks' in sys.modules)"
    assert run(code).stdout == "False\n"
    assert run(code, SGLANG_USE_CPU_ENGINE="0").stdout == "False\n"


def test_names_outside_the_subset_say_so():
    import sgl_kernel

    with pytest.raises(AttributeError, match="fused_moe is not part of eagle-plugin-sglang-cpu"):
        sgl_kernel.fused_moe  # noqa: B018
    with pytest.raises(ImportError):
        from sgl_kernel import moe_align_block_size  # noqa: F401
    assert not hasattr(sgl_kernel, "convert_weight_packed")


def test_torchvision_names_import_and_refuse_to_work():
    """torch provides them, by the entry point."""
    import torchvision
    import torchvision.transforms.v2.functional as functional
    from torchvision.io import decode_jpeg
    from torchvision.transforms import Compose, InterpolationMode

    assert (
        InterpolationMode.BICUBIC.value == "bicubic" and torchvision.transforms.InterpolationMode is InterpolationMode
    )
    for use in (Compose, functional.resize, decode_jpeg, torchvision.ops.nms):
        with pytest.raises(NotImplementedError, match="install a torchvision that matches"):
            use([])


def test_a_real_torchvision_comes_first(tmp_path):
    """Also where names of it are asked for that it does not have."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("real = True\n")
    missing = "try: import torchvision.io\nexcept ModuleNotFoundError: print('missing')"
    result = run(f"import torch, torchvision\nprint(torchvision.real)\n{missing}", tmp_path)
    assert result.stdout == "True\nmissing\n", result.stderr
