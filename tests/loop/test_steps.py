"""The order of the loop's steps, what is skipped after an interruption, and the time left that is told."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from eagle_plugin.bench.progress import Steps
from eagle_plugin.learning.data.rows import TokenRow, format_row
from eagle_plugin.learning.loop.plan import plan_steps
from eagle_plugin.learning.loop.settings import LoopError, LoopSettings, keep_settings
from eagle_plugin.learning.loop.steps import Step, minutes, read_times, run_steps


class World:
    """Steps that write their output, on a clock that they move; `fails` names one that stops."""

    def __init__(self, folder: Path, fails: str = "") -> None:
        self.folder, self.fails, self.now = folder, fails, 0.0
        self.ran: list[str] = []
        self.text = io.StringIO()

    def step(self, name: str, seconds: float, real: float, writes: bool = True) -> Step:
        output = self.folder / name

        def run() -> None:
            self.ran.append(name)
            self.now += real
            if name == self.fails:
                raise KeyboardInterrupt
            if writes:
                output.write_text("made")

        return Step(name, output, seconds, run)

    def run(self, *steps: Step) -> dict[str, float]:
        return run_steps(steps, self.folder / "times.json", Console(file=self.text, width=200), lambda: self.now)


def test_steps_run_in_order_and_the_time_left_follows_their_pace(tmp_path: Path) -> None:
    world = World(tmp_path)
    spent = world.run(world.step("one", 60, 120), world.step("two", 90, 180), world.step("three", 30, 60))
    assert world.ran == ["one", "two", "three"]
    assert spent == {"one": 120, "two": 180, "three": 60} == read_times(tmp_path / "times.json")
    lines = world.text.getvalue().splitlines()
    assert "1/3 one, about 1:00 minutes; 3:00 minutes left in all" in lines[0]
    assert "2/3 two, about 2:15 minutes; 3:00 minutes left in all" in lines[2]  # one and a half times as slow


def test_what_was_interrupted_runs_again_and_what_is_done_does_not(tmp_path: Path) -> None:
    first = World(tmp_path, fails="two")
    plan = [("one", 60, 10), ("two", 60, 25), ("three", 60, 5)]
    with pytest.raises(KeyboardInterrupt):
        first.run(*(first.step(*one) for one in plan))
    assert first.ran == ["one", "two"] and read_times(tmp_path / "times.json")["two"] == 25
    again = World(tmp_path)
    spent = again.run(*(again.step(*one) for one in plan))
    assert again.ran == ["two", "three"]
    assert spent == {"one": 10, "two": 50, "three": 5}  # of both runs
    assert "1/3 one: done before" in again.text.getvalue()


def test_a_step_without_its_output_is_an_error(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(LoopError, match="'one' ended without"):
        world.run(world.step("one", 1, 1, writes=False), world.step("two", 1, 1))
    assert world.ran == ["one"]


@pytest.mark.parametrize("content", ["", "[1]", '{"one": "x"}', "{"])
def test_damaged_times_count_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "times.json").write_text(content)
    assert read_times(tmp_path / "times.json") == {}


def test_minutes_are_readable() -> None:
    assert [minutes(one) for one in (0.4, 59, 60, 245)] == ["0 s", "59 s", "1:00 minutes", "4:05 minutes"]


def test_other_settings_are_refused_with_both_values(tmp_path: Path) -> None:
    path = tmp_path / "loop/settings.json"
    keep_settings(LoopSettings(), path)
    keep_settings(LoopSettings(), path)
    with pytest.raises(LoopError, match=r"epochs 8 \(now 9\), lr"):
        keep_settings(LoopSettings(epochs=9, lr=0.5), path)
    assert json.loads(path.read_text())["epochs"] == 8
    path.write_text("{")
    with pytest.raises(LoopError, match="cannot be read"):
        keep_settings(LoopSettings(), path)


def plan(tmp_path: Path, calls: list[list[str]], **settings: object) -> dict[str, Step]:
    steps = plan_steps(
        LoopSettings(**settings),  # type: ignore[arg-type]
        tmp_path / "target",
        tmp_path / "base",
        tmp_path,
        tmp_path / "loop",
        Steps(Console(file=io.StringIO())),
        command=lambda name, args: calls.append(args),
    )
    return {step.name: step for step in steps}


def test_the_plan_trains_on_the_capture_and_measures_what_is_held_out(tmp_path: Path) -> None:
    calls: list[list[str]] = []
    steps = plan(tmp_path, calls, concurrency=(1, 8))
    assert list(steps) == [
        "prompts", "traffic", "export", "prepare", "rows", "features", "train", "accept length", "benchmark",
        "report", "exchange",
    ]  # fmt: skip
    assert len({step.output for step in steps.values()}) == len(steps)
    row = TokenRow("a#0", "traffic", [1], [2], "recorded", "val")
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop/rows.jsonl").write_text(format_row(row))
    for name in ("export", "prepare", "rows", "features", "train", "benchmark", "report"):
        steps[name].run()
    export, prepare, rows, features, train, bench, report = calls
    calls.clear()
    assert export[2] == str(tmp_path / "loop/capture")
    assert "--keep-responses" in prepare and prepare[prepare.index("--target") + 1] == str(tmp_path / "target")
    for maker, user in ((export, prepare), (prepare, rows), (rows, features)):  # each reads what the one before wrote
        assert maker[maker.index("--out") + 1] in user
    recipe = (tmp_path / "loop/train.yaml").read_text()
    assert "eval_tokens: 4000" in recipe
    (tmp_path / "loop/rows.jsonl").write_text(format_row(replace(row, split="train")))
    steps["train"].run()  # few prompts can have none of split val
    assert "eval_tokens: 0" in (tmp_path / "loop/train.yaml").read_text()
    assert train[1] == str(tmp_path / "loop/train.yaml")
    assert f"store: {features[features.index('--store') + 1]}" in recipe and f"from: {tmp_path / 'base'}" in recipe
    held_out = str(tmp_path / "loop/held-out.jsonl")
    assert held_out in bench and not any(held_out in args for args in (export, prepare, rows, features, train))
    assert bench[bench.index("--concurrency") + 1 :][:2] == ["1", "8"] and "--resume" not in bench
    assert report[-2:] == ["--out", str(tmp_path)]
    assert 600 < sum(step.seconds for step in steps.values()) < 40 * 60


def test_an_interrupted_benchmark_is_resumed(tmp_path: Path) -> None:
    calls: list[list[str]] = []
    (tmp_path / "loop/benchmark").mkdir(parents=True)
    (tmp_path / "loop/benchmark/states.measured.json").write_text("{}")
    plan(tmp_path, calls)["benchmark"].run()
    assert "--resume" in calls[0]
