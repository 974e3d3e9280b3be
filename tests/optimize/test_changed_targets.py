"""What a job does when its target was moved, and when it was changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from job_worlds import STAGES
from rich.console import Console

from eagle_plugin.learning.jobs.recipe import read_job
from eagle_plugin.learning.jobs.runner import run_job


def run_with(target: Path, recipe: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the stages until the answers; returns what was printed."""
    run_job(read_job(recipe), target, out, Console(stderr=True, width=500), until="answers")
    return capsys.readouterr().err


def test_answers_stay_where_the_target_moved_and_are_kept_where_it_changed(
    recipe, stages, tiny_target, tmp_path, capsys
) -> None:
    out, moved = tmp_path / "out", shutil.copytree(tiny_target, tmp_path / "moved")
    run_with(tiny_target, recipe, out, capsys)
    answers = out / "generated.jsonl"
    answers.write_text("")
    (out / "features" / "generated").mkdir(parents=True)
    assert "2/5 answers of the target: done before" in run_with(moved, recipe, out, capsys)
    assert stages.ran == list(STAGES[:2]) and (out / "features" / "generated").is_dir()
    (moved / "chat_template.jinja").write_text("another")
    printed = run_with(moved, recipe, out, capsys)
    assert "answers of the target: begins anew" in printed and "is kept as generated.jsonl.before" in printed
    assert (out / "generated.jsonl.before").read_text() == "" and not (out / "features" / "generated").exists()


def test_a_changed_target_is_noticed_in_a_job_of_an_earlier_version(recipe, stages, tiny_target, tmp_path, capsys):
    """Its record has fewer settings of a stage, or none."""
    out, other = tmp_path / "out", shutil.copytree(tiny_target, tmp_path / "other")
    (other / "chat_template.jinja").write_text("another")
    run_with(tiny_target, recipe, out, capsys)
    record = json.loads((out / "job.json").read_text())
    for settings in (None, json.dumps([24, [0.0]])):
        old = {name: value for name, value in record.items() if not name.startswith("begun")}
        old |= {"begun: answers of the target": settings} if settings else {}
        (out / "job.json").write_text(json.dumps(old))
        assert run_with(tiny_target, recipe, out, capsys).count("done before") == 2
        assert "answers of the target: begins anew" in run_with(other, recipe, out, capsys)
