"""Mutation testing: changes the sources in a drawn sample of places, and counts the changes that the tests find.

    make mutation                       # 300 mutants of eagle_plugin/core, to out/mutation.json
    make mutation ARGS='--room runtime --count 100 --minutes 20'
    make mutation ARGS='--files eagle_plugin/core/tree.py --tests tests/core --count 50'

A mutant is one operator of cosmic-ray in one place. It is *killed* if a test fails or takes far too long, and
*survives* if all tests pass: each survivor needs a test, or a reason (docs/reliability.md). The tests of a room run in
a fork that imports the changed module in place of the file; no file is changed. Those that name the module come first.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# A room: its files, and the tests that are to find faults in them.
ROOMS = {
    "core": (
        ["eagle_plugin/core/*.py"],
        ["tests/core", "tests/kernels/test_*_kernels.py", "tests/policy/test_path_sums.py"],
    ),
    "policy": (
        ["eagle_plugin/policy/*.py"],
        ["tests/policy", "tests/engines/test_policy_*.py", "tests/engines/test_shape_*.py"],
    ),
    "runtime": (
        [f"eagle_plugin/runtime/{name}.py" for name in ("round", "parallel_levels", "accept")],
        [f"tests/engines/test_{name}.py" for name in ("round", "parallel_levels", "captured_rounds", "fake_cuda")],
    ),
    "kernels": (  # their torch paths and checks
        [
            f"eagle_plugin/kernels/{name}.py"
            for name in ("accepted_path", "attention_torch", "kv", "penalties", "round_start", "sampling", "tree")
        ],
        ["tests/kernels/test_*_kernels.py", "tests/kernels/test_argument_checks.py", "tests/core"],
    ),
}
PATIENCE = 4  # a mutant that takes so many times as long as the unchanged sources is killed


class Outcome(NamedTuple):
    """What became of a mutant."""

    path: str
    operator: str
    line: int  # the first changed line
    change: str  # the changed lines, before and after
    outcome: str  # killed, too long, survived
    seconds: float


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from other source text."""

    def __init__(self, path: Path, source: str) -> None:
        parts = path.with_suffix("").parts
        self.name, self.path, self.source = ".".join(parts), path, source

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(ROOT / self.path))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(ROOT / self.path)
        exec(compile(self.source, module.__file__, "exec"), module.__dict__)


def run_tests(files: Sequence[Path], changed: _Changed | None, limit: float | None, log: Path) -> tuple[str, float]:
    """The tests in a fork, until one fails: passed, killed or too long; and the seconds."""
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        if changed is not None:
            sys.meta_path.insert(0, changed)
        import pytest

        found = pytest.main(
            ["-x", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "not matrix and not server", *map(str, files)]
        )
        sys.stdout.flush()
        os._exit(int(found))
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        seconds = time.monotonic() - begin
        if ended:
            return ("passed" if os.waitstatus_to_exitcode(status) == 0 else "killed"), seconds
        if limit is not None and seconds > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "too long", seconds
        time.sleep(0.02)


def in_order(tests: Sequence[Path], module: str) -> list[Path]:
    """The tests that name the module first."""
    name = module.rpartition(".")[2]
    return sorted(tests, key=lambda test: (module not in (text := test.read_text()), name not in text, str(test)))


def describe(path: Path, source: str) -> tuple[int, str]:
    """The first changed line, and the changed lines before and after."""
    before = path.read_text(encoding="utf-8").splitlines()
    lines = list(difflib.unified_diff(before, source.splitlines(), n=0, lineterm=""))[2:]
    place = int(lines[0].split("-")[1].split(" ")[0].split(",")[0])
    return place, "\n".join(line for line in lines[1:] if not line.startswith("@@"))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", choices=ROOMS, default="core", help="files and tests (default: core)")
    parser.add_argument("--files", nargs="+", help="files to change in place of a room's")
    parser.add_argument("--tests", nargs="+", help="files or folders of tests in place of a room's")
    parser.add_argument("--count", type=int, default=300, help="mutants (default: 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60, help="then the rest is left out (default: 60)")
    parser.add_argument("--generator", type=Path, default=ROOT / ".venv-mutation/bin/python", help="has cosmic-ray")
    parser.add_argument("--json", type=Path, help="default: out/mutation-ROOM.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw mutants, run the tests on each, and write what became of them."""
    options, begin = parse(argv), time.monotonic()
    os.chdir(ROOT)
    of_room = ROOMS[options.room]
    sources, tests = _files(options.files or of_room[0]), _files(options.tests or of_room[1])
    drawing = [
        options.generator,
        "tools/mutants.py",
        *sources,
        "--count",
        str(options.count),
        "--seed",
        str(options.seed),
    ]
    drawn = json.loads(subprocess.run(list(map(str, drawing)), check=True, stdout=subprocess.PIPE).stdout)
    mutants = drawn["mutants"]
    report = options.json or ROOT / f"out/mutation-{options.room}.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    log = report.with_suffix(".log")
    for name in ("hypothesis", "numpy", "pytest", "scipy", "torch"):  # a fork has them at once
        importlib.import_module(name)
    found, whole = run_tests(tests, None, None, log)
    if found != "passed":
        raise SystemExit(f"error: the tests fail without a mutant; {log} says why")
    print(f"{len(mutants)} of {drawn['of']} mutants of {options.room}; all tests take {whole:.0f} s", flush=True)
    outcomes: list[Outcome] = []
    for number, mutant in enumerate(mutants, 1):
        if time.monotonic() - begin > 60 * options.minutes:
            print(f"{len(mutants) - number + 1} mutants are left out: {options.minutes} minutes are over")
            break
        path = Path(mutant["path"])
        changed = _Changed(path, mutant["source"])
        result, seconds = run_tests(in_order(tests, changed.name), changed, PATIENCE * whole, log)
        line, change = describe(path, mutant["source"])
        result = "survived" if result == "passed" else result
        outcomes.append(Outcome(str(path), mutant["operator"], line, change, result, seconds))
        if result == "survived":
            print(f"{path}:{line} {mutant['operator']}\n{change}", flush=True)
        killed = sum(outcome.outcome != "survived" for outcome in outcomes)
        print(f"{number:4d} of {len(mutants)}: {killed / number:.1%} killed", flush=True)
    survivors = [outcome._asdict() for outcome in outcomes if outcome.outcome == "survived"]
    killed = len(outcomes) - len(survivors)
    document = {
        "room": options.room, "seed": options.seed, "mutants": drawn["of"], "drawn": len(outcomes), "killed": killed,
        "share": killed / max(len(outcomes), 1), "seconds_of_all_tests": whole, "survivors": survivors,
    }  # fmt: skip
    report.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{killed} of {len(outcomes)} killed ({document['share']:.1%}); written to {report}")
    return 0


def _files(patterns: Sequence[str]) -> list[Path]:
    """The files of patterns below the checkout, of a folder its tests."""
    found = [path.relative_to(ROOT) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [file for path in found for file in (sorted(path.glob("test_*.py")) if path.is_dir() else [path])]


if __name__ == "__main__":
    raise SystemExit(main())
