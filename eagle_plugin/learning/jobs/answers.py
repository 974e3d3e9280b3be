"""The answers that a job has, after its prompts have changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.learning.data.generation.journal import output_files
from eagle_plugin.learning.data.rows import prompt_id_of
from eagle_plugin.learning.data.sources.prompts import read_prompts


def features_of(rows: Path) -> Path:
    """The feature store of a file of token rows."""
    return rows.parent / "features" / rows.stem


def made_of_answers(rows: Path) -> tuple[Path, ...]:
    """What one stage makes while the target answers: the rows, the files beside them, and their features."""
    return *output_files(rows), features_of(rows)


def keep_answers_to(prompts: Path, rows: Path) -> int:
    """Remove the answers to prompts that are no longer in the file, such as those that a filter now leaves out.

    Where there are any, the features of all answers go too: a store holds whole shards. Returns how many.
    """
    if not rows.is_file():
        return 0
    wanted = {prompt.id for prompt in read_prompts(prompts)}

    def kept(path: Path, key: str) -> tuple[list[str], int]:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        own = [line for line in lines if prompt_id_of(_value(line, key)) in wanted]
        return own, len(lines) - len(own)

    answers, removed = kept(rows, "id")
    _, skipped, _ = output_files(rows)
    if removed:
        shutil.rmtree(features_of(rows), ignore_errors=True)
        write_output(rows, answers)
    if skipped.is_file():
        reasons, stale = kept(skipped, "prompt")
        if stale:
            write_output(skipped, reasons)
    return removed


def _value(line: str, key: str) -> str:
    try:
        found: Any = json.loads(line)
        return str(found[key])
    except (ValueError, LookupError, TypeError):
        return ""  # not of ours: `data generate` says so
