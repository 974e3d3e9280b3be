"""Everything that needs an NVIDIA GPU, in one command: `make gpu`, `make gpu ENGINE=vllm`, or

    python benchmarks/gpu/run.py [--engine vllm] [--steps NAME ...] [--again] [--out out/gpu]

The steps without an engine come first; those of the engine are named after it, but for SGLang's. Each step runs in a
process of its own and writes OUT/NAME.json when it is finished, and OUT/NAME.log in any case. A step that was finished
by the same sources on the same device with the same versions is not run again. When a step fails, the others go on, and
the exit code is 1. With `--device cpu --tiny` every step that can runs in a small form on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.steps import ENGINES, SKIPPED, STEPS, Setting, Step, find, steps_of
from eagle_plugin.atomic_io import write_output
from eagle_plugin.command_end import end_of
from eagle_plugin.errors import UserError, json_fault

ROOT = Path(__file__).resolve().parents[2]
FAILED = 1  # the exit code when a step failed


class NoGpu(UserError):
    """This machine cannot run the steps."""


class Outcome(NamedTuple):
    """How a step ended."""

    status: str  # "done", "done before", "skipped" or "failed"
    sentence: str = ""


def check_device(device: str) -> None:
    """NoGpu if the steps cannot run on this device."""
    needs = (
        "make gpu needs a Linux machine with an NVIDIA GPU (compute capability 8.0 or more), torch for CUDA and nvcc"
    )
    try:
        import torch
    except ImportError as error:
        raise NoGpu(
            f"{sys.executable} cannot import torch ({error}); {needs}; name another with GPU_PYTHON="
        ) from error
    if not device.startswith("cuda"):
        return
    if not torch.cuda.is_available():
        raise NoGpu(f"no NVIDIA GPU was found by torch {torch.__version__}; {needs}")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        name = torch.cuda.get_device_name(device)
        raise NoGpu(f"{name} has compute capability {capability[0]}.{capability[1]}, wanted 8.0 or more; {needs}")


def finished(file: Path, identity: dict[str, str]) -> bool:
    """Whether the file is the result of a step with this identity."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        return bool(document["identity"] == identity)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = json_fault(error) if isinstance(error, ValueError | RecursionError) else "is not a result of a step"
        print(f"{file} {reason}: the step runs again", file=sys.stderr)
        return False


def run_step(step: Step, setting: Setting, identity: dict[str, str], out: Path) -> Outcome:
    """Run a step in a process of its own, and write its result when it is finished."""
    raw, log = out / f".{step.name}.result", out / f"{step.name}.log"
    command = [sys.executable, "-m", "benchmarks.gpu.run_step", step.name, "--device", setting.device]
    command += ["--json", str(raw.resolve()), *(["--tiny"] if setting.tiny else [])]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    started = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    seconds = time.perf_counter() - started
    last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
    if ended == SKIPPED:
        return Outcome("skipped", last.removeprefix("skipped: "))
    if ended or not raw.exists():
        return Outcome("failed", f"{last.removeprefix('error: ')} (exit code {ended}, see {log})")
    result = json.loads(raw.read_text(encoding="utf-8"))
    raw.unlink()
    document: dict[str, Any] = {"step": step.name, "what": step.what, "identity": identity}
    document |= {"date": datetime.date.today().isoformat(), "seconds": round(seconds, 1), "result": result}
    write_output(out / f"{step.name}.json", [json.dumps(document, indent=1) + "\n"])
    return Outcome("done", "\n  ".join([f"{seconds:.0f} s", *result.get("summary", ())]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="sglang", help="whose servers (default: sglang)")
    parser.add_argument("--steps", nargs="+", metavar="NAME", help=f"of {', '.join(step.name for step in STEPS)}")
    parser.add_argument("--again", action="store_true", help="run finished steps too")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, few repeats")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), metavar="FOLDER")
    options = parser.parse_args(argv)
    steps = [find(name) for name in options.steps] if options.steps else steps_of(options.engine)
    check_device(options.device)
    from benchmarks.gpu.environment import engine_version, identity

    setting = Setting(options.device, options.tiny)
    shared = identity(setting)
    options.out.mkdir(parents=True, exist_ok=True)
    print(", ".join(f"{name} {value}" for name, value in shared.items()))
    statuses = []
    for step in steps:
        file, about = options.out / f"{step.name}.json", shared | engine_version(step.engine)
        if not options.again and finished(file, about):
            outcome = Outcome("done before", str(file))
        else:
            print(f"{step.name}: {step.what} ...", flush=True)
            outcome = run_step(step, setting, about, options.out)
        print(f"{step.name}: {outcome.status}: {outcome.sentence}", flush=True)
        statuses.append(outcome.status)
    if "failed" in statuses:
        print(f"error: {statuses.count('failed')} of {len(statuses)} steps failed", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
