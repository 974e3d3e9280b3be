"""Everything that a GPU run does, on a machine without a GPU and, but for the preparation, without a network:

    python benchmarks/gpu/rehearse.py [--python python3.12] [--vllm-python .venv-vllm/bin/python] [--out out/rehearse]

1. An environment like that of a GPU machine: Python 3.12, torch 2.11.0 and its Triton 3.6.0, transformers; no engine.
   It is made once, in OUT/env. Where the index has torch 2.11.0 with CUDA only, this downloads 3 GB. Where there is no
   Python 3.12, it is made with this Python, and a sentence says so.
2. The archives of benchmarks/gpu/portable.py for that environment, both engines, as for a GPU.
3. The folders go to a new folder one after the other, each with its own script, in a network namespace without
   interfaces but the loopback (`unshare`), where the system allows it. Then every step runs in its tiny form.
4. The steps of vLLM run by the same script with --vllm-python, which has vLLM for a CPU, in place of the carried build
   for GPUs, which is imported only. SGLang's carried files are those of a GPU, but for the functions of sgl_kernel,
   which are those of compat/sglang-cpu.

It prints the sizes, every step with its seconds, and the total; the exit code is 1 if a step failed, or is not complete
and was not skipped for lack of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.steps import ALL, Step, steps_of
from eagle_plugin.common.command_end import end_of
from eagle_plugin.common.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
WANTED_PYTHON = "3.12"
TORCH = ("torch==2.11.0+cpu", "torch==2.11.0")  # the first that the index has
# What such a machine has beside torch, as far as an engine or a step imports it.
MACHINE = (
    *("transformers==5.17.0", "numpy==2.5.2", "scipy", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
    *("psutil", "requests", "rich", "jinja2", "aiohttp", "httpx", "pillow", "protobuf", "sentencepiece", "tiktoken"),
    *("regex", "six", "typer", "uvloop", "setuptools", "ninja", "einops", "pydantic"),
)
NEEDS_GPU = ("sanitizers", "server", "vllm-server")  # skipped on a CPU
# Engines talk to their own processes over the loopback, which a new namespace has switched off: SIOCGIFFLAGS,
# SIOCSIFFLAGS with IFF_UP.
LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket() as s:
    flags, = struct.unpack_from("16xH", fcntl.ioctl(s, 0x8913, struct.pack("16sH14x", b"lo", 0)))
    fcntl.ioctl(s, 0x8914, struct.pack("16sH14x", b"lo", flags | 1))
os.execvp(sys.argv[1], sys.argv[1:])
"""
IMPORTED = "import vllm.engine.arg_utils, vllm.v1.worker.gpu_model_runner"


class RehearsalError(UserError):
    """What keeps the rehearsal from being made."""


def find_python() -> Path:
    """A Python 3.12 of this machine; without one, this Python, with a sentence on stderr."""
    places = [shutil.which(f"python{WANTED_PYTHON}")]
    versions = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    places += [str(found / "bin/python") for found in sorted(versions.glob(f"{WANTED_PYTHON}.*"))]
    for place in filter(None, places):
        done = subprocess.run([place, "--version"], capture_output=True, text=True)
        if done.stdout.startswith(f"Python {WANTED_PYTHON}."):
            return Path(place)
    print(f"no Python {WANTED_PYTHON} was found, this one is used: {sys.version.split()[0]}", file=sys.stderr)
    return Path(sys.executable)


def make_environment(python: Path, folder: Path) -> Path:
    """The interpreter of an environment like that of a GPU machine, made if it is not complete."""
    inside, complete = folder / "bin/python", folder / "complete"
    wanted = "\n".join((*TORCH, *MACHINE))
    if complete.exists() and complete.read_text() == wanted:
        return inside
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([str(python), "-m", "venv", str(folder)], check=True)
    pip = [str(inside), "-m", "pip", "install", "--quiet"]
    for torch in TORCH:
        done = subprocess.run([*pip, torch], capture_output=True, text=True)
        if done.returncode == 0:
            break
    else:
        last = (done.stderr.strip() or "no reason").splitlines()[-1]
        raise RehearsalError(f"pip could not install {TORCH[-1]} ({last}); check the network")
    subprocess.run([*pip, *MACHINE], check=True, capture_output=True)
    complete.write_text(wanted)
    return inside


def offline() -> list[str]:
    """What starts a program without a network; nothing, with a sentence on stderr, where the system forbids it."""
    command = ["unshare", "--map-root-user", "--net", sys.executable, "-c", LOOPBACK_UP]
    if shutil.which(command[0]) and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
        return command
    print("unshare cannot be used here: the network is not cut off", file=sys.stderr)
    return []


def carry(portable: Path, machine: Path, python: Path, alone: Sequence[str]) -> None:
    """Every folder to the machine, as a call of its own: its script sees the pieces of that folder only."""
    for call in sorted((place for place in portable.iterdir() if place.name.isdigit()), key=lambda p: int(p.name)):
        there = machine / "call"
        shutil.copytree(call, there)
        subprocess.run([*alone, str(python), str(there / "run.py"), str(machine / "carried")], check=True)
        shutil.move(there / "run.py", machine / "run.py")
        shutil.move(there / "manifest.json", machine / "manifest.json")
        shutil.rmtree(there)


def put_cpu_kernels(site: Path) -> None:
    """SGLang's functions for a CPU in place of those for a GPU, with the entry point that registers them."""
    source = ROOT / "compat/sglang-cpu"
    shutil.rmtree(site / "sgl_kernel", ignore_errors=True)
    shutil.copytree(source / "src", site, dirs_exist_ok=True)
    about = site / "eagle_plugin_sglang_cpu-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: eagle-plugin-sglang-cpu\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\neagle_sglang_cpu = eagle_sglang_cpu:register\n")


def run_steps(machine: Path, python: Path, alone: Sequence[str], steps: Sequence[str]) -> None:
    """The script's own way to run steps; what fails is read from the results."""
    command = [*alone, str(python), str(machine / "run.py"), str(machine / "carried"), "--device", "cpu", "--tiny"]
    command += ["--minutes", "60", "--pack", str(machine / "results.tar.gz"), "--steps", *steps]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"})


def report(machine: Path, steps: Sequence[Step]) -> tuple[list[str], list[str]]:
    """A line for every step, and the names of those that are not complete."""
    lines, wrong = [], []
    for step in steps:
        file = machine / f"carried/results/{step.name}.json"
        document: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        if document and "unfinished" not in document:
            lines.append(f"{step.name}: complete, {document['seconds']:.0f} s")
        elif step.name in NEEDS_GPU:
            lines.append(f"{step.name}: skipped, it needs a GPU")
        else:
            lines.append(f"{step.name}: not complete ({document.get('unfinished', 'no result')})")
            wrong.append(step.name)
    return lines, wrong


def make_archives(engines: Sequence[str], python: Path, out: Path) -> None:
    """Those of benchmarks/gpu/portable.py for this interpreter, and what it has, on stdout."""
    have = subprocess.run([str(python), "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True).stdout
    (out / "packages.txt").write_text(have)
    version = subprocess.run([str(python), "--version"], capture_output=True, text=True).stdout.split()[1]
    found = [line for line in have.splitlines() if line.startswith(("torch==", "triton=="))]
    print(", ".join([f"Python {version}", *found]), flush=True)
    command = [sys.executable, str(ROOT / "benchmarks/gpu/portable.py"), *engines, "--stand-in"]
    command += ["--have", str(out / "packages.txt"), "--out", str(out / "portable")]
    command += ["--python", ".".join(version.split(".")[:2]), "--results", str(out / "none")]
    if subprocess.run(command, cwd=ROOT).returncode:
        raise RehearsalError("the archives were not made, see above")


def import_vllm(site: Path, python: Path) -> bool:
    """Whether the carried vLLM for GPUs can be imported; then its packages make room for those of another Python."""
    path = os.pathsep.join(str(site / folder) for folder in ("vllm", "common"))
    done = subprocess.run([str(python), "-c", IMPORTED], env=os.environ | {"PYTHONPATH": path})
    shutil.rmtree(site / "vllm")
    shutil.rmtree(site / "common")
    return done.returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, metavar="FILE", help=f"default: a Python {WANTED_PYTHON}, else this one")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm/bin/python", metavar="FILE")
    parser.add_argument("--out", type=Path, default=ROOT / "out/rehearse", metavar="DIR", help="kept: the environment")
    parser.add_argument("--engines", nargs="*", choices=("sglang", "vllm"), default=["sglang", "vllm"])
    options = parser.parse_args(argv)
    began, out, wrong = time.perf_counter(), options.out.resolve(), []
    python = make_environment(options.python or find_python(), out / "env")
    make_archives(options.engines, python, out)
    alone = offline()
    steps = [step for step in steps_of(ALL) if step.engine in (None, *options.engines)]
    with tempfile.TemporaryDirectory() as name:
        machine, carried = Path(name), time.perf_counter()
        carry(out / "portable", machine, python, alone)
        print(f"unpacked in {time.perf_counter() - carried:.0f} s", flush=True)
        site = machine / "carried/site"
        if "sglang" in options.engines:
            put_cpu_kernels(site / "sglang")
        run_steps(machine, python, alone, [step.name for step in steps if step.engine != "vllm"])
        if "vllm" in options.engines:
            wrong += [] if import_vllm(site, python) else ["the import of vLLM's carried build"]
            run_steps(machine, options.vllm_python, alone, [step.name for step in steps if step.engine == "vllm"])
        lines, unfinished = report(machine, steps)
        print("\n".join(lines))
        kept = (machine / "results.tar.gz").stat().st_size
    print(f"{time.perf_counter() - began:.0f} s in all; the results are {kept / 1e6:.2f} MB in one file")
    if wrong := [*wrong, *unfinished]:
        print(f"error: not complete: {', '.join(wrong)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
