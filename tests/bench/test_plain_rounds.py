"""The benchmark of plain rounds: ratios are of the same turns, and the engines of all sides are real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import plain_rounds
from benchmarks.plain_rounds import PYTHON, SIDES, PlainRounds, Step

ROOT = Path(__file__).parents[2]


def test_ratios_are_of_the_same_turns() -> None:
    vllm = [Step(0.1, 0.2, 4), Step(0.3, 0.3, 4), Step(0.1, 0.1, 4)]
    side = [Step(0.1, 0.4, 4), Step(0.15, 0.3, 4), Step(0.2, 0.2, 4)]
    cost = plain_rounds.cost(side, vllm)
    assert (cost.ms, cost.ratio, cost.wall_ratio) == (150.0, 0.9, 1.5)
    assert (cost.pairs.q1, cost.pairs.median, cost.pairs.q3) == (0.75, 1.0, 1.5)


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/plain_rounds.py"), *options],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.server
@pytest.mark.matrix
@pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-vllm; make it with `make env-vllm`")
def test_all_sides_take_the_same_steps(tmp_path: Path) -> None:
    file = tmp_path / "plain.json"
    done = run("--requests", "2", "--steps", "12", "--json", str(file))
    assert done.returncode == 0, done.stderr[-3000:]
    report = PlainRounds.model_validate_json(file.read_text())
    (row,) = report.rows
    assert row.requests == 2 and row.steps == 12 and 0 < row.decode_steps <= 12
    assert list(row.decode) == list(row.all) == list(SIDES)
    assert row.decode["vllm"].ratio == row.all["vllm"].wall_ratio == 1.0
    assert all(cost.ms > 0 and cost.ratio > 0 for cost in (*row.decode.values(), *row.all.values()))
    assert report.versions["eagle-plugin"] and json.loads(file.read_text())["target"] == "smollm2-135m-instruct"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "wanted requests, steps and threads of at least 1"),
        (["--python", "absent/python"], "--python absent/python does not exist: make it by `make env-vllm`"),
    ],
)
def test_wrong_options(options: list[str], message: str) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
