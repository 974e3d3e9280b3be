"""`loop.json`: its form, where its numbers come from, and when the loop counts as good."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from states_reports import states_report

from eagle_plugin.learning.loop.prompts import LoopError
from eagle_plugin.learning.loop.summary import LoopReport, print_report, read_report, summarise

SWAP: dict[str, Any] = {
    "requests": 30, "during": 4, "after": 12, "failed": 0, "errors": [], "responses_changed": 0, "seconds": 1.5,
    "accept_length_before": 1.7, "accept_length_after": 1.9, "deployed": {"ok": True},
}  # fmt: skip


def stats(mean: float) -> dict[str, Any]:
    return {"accept_length": mean, "low": mean - 0.1, "high": mean + 0.1}


def folder_of_a_loop(folder: Path, after: float = 2.75, **swap: Any) -> Path:
    """What the steps leave, as far as the summary reads it."""
    (folder / "benchmark").mkdir(parents=True)
    (folder / "benchmark/states.json").write_text(states_report().model_dump_json())
    details = {
        "base": {"stdlib": {"chain4_t0": stats(2.0), "tree16_t0": stats(2.5)}},
        "head": {"stdlib": {"chain4_t0": stats(2.2), "tree16_t0": stats(after)}},
    }
    (folder / "accept-details.json").write_text(json.dumps(details))
    (folder / "recorded.jsonl").write_text("{}\n" * 290)
    (folder / "swap.json").write_text(json.dumps(SWAP | swap))
    stages = {"train head": {"seconds": 61.0}, "traffic": {"seconds": 20.0}}
    recipe = {"traffic": {"prompts": "/data/questions.jsonl", "count": 300, "held_out": 40}}
    (folder / "lineage.json").write_text(json.dumps({"stages": stages, "recipe": recipe}))
    return folder


def report_of(folder: Path, swap: bool = True) -> LoopReport:
    summarise(folder, folder, swap)
    return read_report(folder / "loop.json")


def test_of_several_sources_all_prompts_together_are_shown(tmp_path: Path) -> None:
    folder = folder_of_a_loop(tmp_path / "loop")
    details = {
        name: {source: {"tree16_t0": stats(value + n)} for n, source in enumerate(("sharegpt", "code", "all"))}
        for name, value in (("base", 2.0), ("head", 2.2))
    }
    (folder / "accept-details.json").write_text(json.dumps(details))
    report = report_of(folder)
    assert (report.accept_length_before, report.accept_length_after) == (4.0, 4.2)


def test_the_file_has_what_the_steps_measured(tmp_path: Path) -> None:
    report = report_of(folder_of_a_loop(tmp_path / "loop"))
    found = json.loads((tmp_path / "loop/loop.json").read_text())
    assert (found["accept_length_before"], found["accept_length_after"], found["gain"]) == (2.5, 2.75, 0.1)
    assert found["prompts"] == {"domain": "questions.jsonl", "asked": 300, "recorded": 290, "held_out": 40}
    assert {row["state"] for row in found["states"]} == {"none", "base", "trained"}
    assert found["swap"]["failed"] == 0 and found["total_seconds"] == 81.0
    assert LoopReport.model_validate(found) == report and report.good


@pytest.mark.parametrize(("after", "swap"), [(2.69, {}), (2.75, {"failed": 1}), (2.75, {"responses_changed": 1})])
def test_less_than_wanted_is_not_good(tmp_path: Path, after: float, swap: dict[str, Any]) -> None:
    report = report_of(folder_of_a_loop(tmp_path / "loop", after, **swap))
    assert not report.good
    assert report_of(tmp_path / "loop", swap=False).swap is None


def test_the_tables_tell_states_gain_and_exchange(tmp_path: Path) -> None:
    text = io.StringIO()
    print_report(report_of(folder_of_a_loop(tmp_path / "loop")), Console(file=text, width=120))
    lines = " ".join(text.getvalue().split())
    parts = ("no EAGLE", "trained head", "tree of 16", "+10.0%", "290 recorded", "0 of 30 failed", "8%: reached")
    for part in (*parts, "minutes: train head 1.0, traffic 0.3"):
        assert part in lines, part


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = folder_of_a_loop(tmp_path / "loop")
    (folder / "swap.json").write_text("{")
    with pytest.raises(LoopError, match="swap.json is not JSON"):
        report_of(folder)
