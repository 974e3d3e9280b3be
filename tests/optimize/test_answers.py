"""What a job keeps of its answers when its prompts or its settings have changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from eagle_plugin.learning.data.generation.journal import Journal
from eagle_plugin.learning.data.rows import TokenRow, read_rows
from eagle_plugin.learning.data.sources.prompts import Prompt, format_prompt
from eagle_plugin.learning.jobs.answers import keep_answers_to
from eagle_plugin.learning.jobs.recipe import JobRecipe
from eagle_plugin.learning.jobs.stage import Stage
from eagle_plugin.learning.jobs.stage_record import begin_anew, identity_of, is_done
from eagle_plugin.learning.jobs.stages import data_stages


def write_prompts(path: Path, names: str) -> Path:
    path.write_text("".join(format_prompt(Prompt(name, "own", prompt=f"ask {name}")) for name in names))
    return path


def test_answers_to_prompts_that_are_gone_are_removed_with_their_features(tmp_path: Path) -> None:
    rows, store = tmp_path / "generated.jsonl", tmp_path / "features/generated"
    prompts = write_prompts(tmp_path / "prompts.jsonl", "abc")
    assert keep_answers_to(prompts, rows) == 0
    with Journal(rows) as journal:
        for name in "ab":
            journal.append([TokenRow(f"{name}#{turn}", "own", [1], [2, 3], "stop", "train") for turn in (0, 1)])
        journal.skip("c", 0, "too long")
    store.mkdir(parents=True)
    write_prompts(prompts, "abcd")  # one more
    assert keep_answers_to(prompts, rows) == 0 and store.is_dir()
    write_prompts(prompts, "bd")
    assert keep_answers_to(prompts, rows) == 2 and not store.exists()
    assert {row.id for row in read_rows(rows)} == {"b#0", "b#1"}
    with Journal(rows) as journal:
        assert journal.done == {"b"}


def test_what_began_with_other_settings_is_put_away(tmp_path: Path) -> None:
    file, folder, done = tmp_path / "rows", tmp_path / "store", {}

    def begin(settings: str | None, digest: str) -> bool:
        """Whether what is there is kept."""
        file.write_text("x")
        folder.mkdir(exist_ok=True)
        begin_anew(Stage("a stage", [], file, partial=(file, folder), settings=settings), done, digest)
        assert file.exists() == folder.exists()
        return file.exists()

    twelve, twenty = json.dumps([12, []]), json.dumps([20, []])
    assert begin(twelve, "digest")  # of a version that noted no settings
    assert begin(twelve, "another digest")  # more prompts
    assert not begin(twenty, "another digest")
    assert (tmp_path / "rows.before").read_text() == "x"
    assert not begin(twelve, "another digest") and (tmp_path / "rows.before-2").exists()
    done.clear()
    assert not begin(None, "digest") and begin(None, "digest") and not begin(None, "another digest")


def test_answers_of_another_target_are_put_away_and_asked_again(tmp_path: Path) -> None:
    """Its name is in no argument of `data generate`."""
    job = JobRecipe(target="unused", prompts={"builtin": 2}, train={"base": {}})
    done: dict[str, str] = {}

    def begin(target: str) -> tuple[bool, bool]:
        """Whether the stage is done before, and what is kept of it then."""
        (stage,) = [one for one in data_stages(job, Path(target), tmp_path) if one.prompts is not None]
        skips = [was_done := is_done(stage, done, "digest")]
        if not was_done:
            begin_anew(stage, done, "digest")
        kept = {path.exists() for path in stage.partial}
        assert len(kept) == 1
        for path in stage.partial:
            path.mkdir(exist_ok=True) if path.parent.name == "features" else path.write_text("x")
        done[stage.name] = "digest"
        return skips[0], kept.pop()

    (tmp_path / "features").mkdir()
    assert begin("models/llama") == (False, False)
    assert begin("models/llama") == (True, True)
    assert begin("models/llama-2") == (False, False)
    begun = next(key for key in done if key.startswith("begun"))
    done[begun] = json.dumps(json.loads(done[begun])[:2])  # a version that did not note the target
    assert begin("models/llama") == (True, True)


def test_answers_of_the_same_target_in_another_folder_are_continued(tmp_path: Path, tiny_target: Path) -> None:
    """A hub's folder has the name of its commit; `data generate` would take it for another model."""
    rows = tmp_path / "generated.jsonl"
    job = JobRecipe(target="unused", prompts={"builtin": 2}, train={"base": {}})
    done: dict[str, str] = {}
    for name in ("one", "two"):
        folder = shutil.copytree(tiny_target, tmp_path / name)
        (stage,) = [one for one in data_stages(job, folder, tmp_path) if one.prompts is not None]
        assert begin_anew(stage, done, "digest") == ""
        with Journal(rows) as journal:
            assert len(journal.done) == (name == "two")
            journal.continue_with(name)
            journal.append([TokenRow(f"{name}#0", "own", [1], [2, 3], "stop", "train")])
    (folder / "config.json").write_text("{}")
    (stage,) = [one for one in data_stages(job, folder, tmp_path) if one.prompts is not None]
    assert "kept as generated.jsonl.before, " in begin_anew(stage, done, "digest")
    assert not rows.exists() and len(list(read_rows(tmp_path / "generated.jsonl.before"))) == 2
    assert identity_of(None) is None and identity_of(tmp_path) == {"folder": str(tmp_path)}
