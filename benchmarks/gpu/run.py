"""Everything that needs an NVIDIA GPU, in one command: `make gpu`, `make gpu ENGINE=vllm`, or

    python benchmarks/gpu/run.py [--engine vllm] [--minutes 12] [--steps NAME ...] [--again] [--out out/gpu]

The steps run in the order in which their results are wanted, each in a process of its own. A step writes OUT/NAME.json
as soon as it knows something, and OUT/NAME.log in any case. A step that was finished by the same sources on the same
device with the same versions is not run again. When a step fails, or reaches its time limit, the rows that it had stay,
the others go on, and the exit code is 1. With --minutes, steps that have a short form run in it, and those that do not
fit into the time that is left are left out by name; the next run, here or on another machine with the same OUT, does
them. With `--device cpu --tiny` every step that can runs in a small form on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.groups import running
from benchmarks.gpu.results import finished, mark, pack, read
from benchmarks.gpu.steps import ALL, ENGINES, SKIPPED, STEPS, Setting, Step, find, steps_of
from eagle_plugin.common.command_end import end_of
from eagle_plugin.common.errors import UserError

FAILED = 1  # the exit code when a step failed
LONGEST = 7200.0  # seconds of a step without --minutes, and on a CPU
GRACE = 10.0  # seconds in which a step that is ended may end what it has started
PACKED_EVERY = 15.0  # seconds between two archives of what is known


class NoGpu(UserError):
    """This machine cannot run the steps."""


class Outcome(NamedTuple):
    """How a step ended."""

    status: str  # "done", "done before", "skipped", "left out" or "failed"
    sentence: str = ""


class Places(NamedTuple):
    """Where the results go and where the engines are."""

    out: Path
    archive: Path | None = None  # of all results, written again and again
    site: Path | None = None  # a folder with packages in `common`, and in a folder for each engine

    def packages(self, step: Step) -> list[str]:
        """Folders for PYTHONPATH."""
        names = filter(None, (step.engine, "common", step.beside))
        return [str(self.site.resolve() / name) for name in names] if self.site else []

    def pack(self) -> None:
        if self.archive is not None:
            pack(self.out, self.archive, cached())


def cached() -> list[Path]:
    """What engines keep beside their logs: why a self-test failed, and the measured costs of rounds."""
    from eagle_plugin.kernels import loader

    return [loader.cache_dir().parent / name for name in ("selftest", "costs")]


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


def run_step(step: Step, setting: Setting, identity: dict[str, str], places: Places, limit: float) -> Outcome:
    """Run a step in a process of its own, which ends after `limit` seconds with all that it has started."""
    file, log = places.out / f"{step.name}.json", places.out / f"{step.name}.log"
    command = [sys.executable, "-m", "benchmarks.gpu.run_step", step.name, "--device", setting.device]
    command += ["--out", str(places.out.resolve()), "--identity", json.dumps(identity)]
    command += [f"--{name}" for name in ("tiny", "short") if getattr(setting, name)]
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *places.packages(step), *filter(None, [os.environ.get("PYTHONPATH")])]
    started = time.perf_counter()
    with (
        log.open("w", encoding="utf-8") as output,
        running(command, {"PYTHONPATH": os.pathsep.join(paths)}, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        ended = wait(process, limit, places)
    seconds = time.perf_counter() - started
    last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
    if ended == SKIPPED:
        return Outcome("skipped", last.removeprefix("skipped: "))
    if ended == 0:
        result = (read(file) or {}).get("result", {})
        return Outcome("done", "\n  ".join([f"{seconds:.0f} s", *result.get("summary", ())]))
    what = f"not finished after {limit:.0f} s, its limit" if ended is None else last.removeprefix("error: ")
    rows = mark(file, identity, what)
    kept = f"; the {rows} rows that it had are in {file}" if rows else ""
    return Outcome("failed", f"{what} ({'' if ended is None else f'exit code {ended}, '}see {log}){kept}")


def wait(process: subprocess.Popen[str], limit: float, places: Places) -> int | None:
    """The exit code of a step, or None: it was ended at its limit."""
    until = time.monotonic() + limit
    while (left := until - time.monotonic()) > 0:
        try:
            return process.wait(min(left, PACKED_EVERY))
        except subprocess.TimeoutExpired:
            places.pack()
    process.terminate()  # it ends its engines; what is left of its process group is killed by `running`
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    return None


def run_all(steps: list[Step], setting: Setting, places: Places, minutes: float | None, again: bool) -> list[Outcome]:
    """Run the steps, print how each ended, and return that."""
    from benchmarks.gpu.environment import engine_version, identity

    shared = identity(setting)
    print(", ".join(f"{name} {value}" for name, value in shared.items()))
    until = time.monotonic() + (60 * minutes if minutes is not None else float("inf"))
    outcomes = []
    for step in steps:
        mine = setting._replace(short=minutes is not None and step.has_short and not setting.tiny)
        about = shared | engine_version(step.engine, places.packages(step))
        about |= {"size": "short"} if mine.short else {}
        file, left = places.out / f"{step.name}.json", until - time.monotonic()
        planned = minutes is not None and setting.on_gpu  # on a CPU the steps take another time
        if not again and finished(file, about):
            outcome = Outcome("done before", str(file))
        elif left < (step.expected if planned else 0):
            outcome = Outcome("left out", f"it takes about {step.expected} s, and {max(left, 0):.0f} s are left")
        else:
            limit = min(float(step.limit) if planned else LONGEST, left)
            print(f"{step.name}: {step.what} (about {step.expected} s) ...", flush=True)
            outcome = run_step(step, mine, about, places, limit)
        print(f"{step.name}: {outcome.status}: {outcome.sentence}", flush=True)
        outcomes.append(outcome)
        places.pack()
    return outcomes


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=(*ENGINES, ALL), default="sglang", help="whose servers (default: sglang)")
    parser.add_argument("--steps", nargs="+", metavar="NAME", help=f"of {', '.join(step.name for step in STEPS)}")
    parser.add_argument("--minutes", type=float, metavar="N", help="what fits into so many, most wanted first")
    parser.add_argument("--again", action="store_true", help="run finished steps too")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, few repeats")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), metavar="FOLDER")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="an archive of OUT, kept up to date (.tar.gz)")
    parser.add_argument("--site", type=Path, metavar="FOLDER", help="packages that benchmarks/gpu/portable.py carried")
    options = parser.parse_args(argv)
    steps = [find(name) for name in options.steps] if options.steps else steps_of(options.engine)
    check_device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    setting, places = Setting(options.device, options.tiny), Places(options.out, options.pack, options.site)
    outcomes = run_all(steps, setting, places, options.minutes, options.again)
    by_status = {
        status: [step.name for step, outcome in zip(steps, outcomes, strict=True) if outcome.status == status]
        for status in ("left out", "failed")
    }
    if names := by_status["left out"]:
        print(f"left out for lack of time: {', '.join(names)}; the same command does them next time")
    if names := by_status["failed"]:
        print(f"error: {len(names)} of {len(steps)} steps failed: {', '.join(names)}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
