"""Questions to ask a server, read from JSON-lines files and assigned to the repeats of a measurement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Question(BaseModel):
    """One user message with its name and its group (chat, code, maths, ...)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1)
    group: str = Field(min_length=1)
    prompt: str = Field(min_length=1)
    # The conversation, where it is more than one user message; `prompt` is then its last one.
    messages: list[dict[str, Any]] | None = None


def read_questions(paths: Iterable[Path]) -> list[Question]:
    """Read every question of the given `.jsonl` files, in order; a ValueError names the file and line of a bad one."""
    questions: list[Question] = []
    places: dict[str, str] = {}
    paths = list(paths)
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read ({error}); give JSON lines with one question per line") from error
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                question = Question.model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                field = ".".join(str(part) for part in first["loc"]) or "the line"
                raise ValueError(
                    f'{place}: {field}: {first["msg"]}; wanted one JSON object {{"id", "group", "prompt"}} per line'
                ) from None
            if question.id in places:
                raise ValueError(
                    f"{place}: prompt id {question.id!r} was already used at {places[question.id]}; rename it"
                )
            places[question.id] = place
            questions.append(question)
    if not questions:
        found = f" in {', '.join(map(str, paths))}" if paths else ""
        raise ValueError(f"no prompts found{found}; give at least one .jsonl file with one question per line")
    return questions


def assign_rounds(questions: Sequence[Question]) -> list[list[Question]]:
    """Assign the questions to rounds with one question of every group, so that every round has the same mix."""
    groups: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        groups[question.group].append(question)
    return [[question for question in row if question is not None] for row in zip_longest(*groups.values())]
