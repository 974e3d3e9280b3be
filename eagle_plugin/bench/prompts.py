"""Questions to ask a server, read from JSON-lines files and dealt out in mixed rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Prompt(BaseModel):
    """One user message with a name and the group (chat, code, maths, ...) that it stands for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1)
    group: str = Field(min_length=1)
    prompt: str = Field(min_length=1)


def read_prompts(paths: Iterable[Path]) -> list[Prompt]:
    """Read every prompt of the given `.jsonl` files, in order; ValueError names the file and line of a bad one."""
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                prompt = Prompt.model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                field = ".".join(str(part) for part in first["loc"]) or "the line"
                raise ValueError(
                    f'{place}: {field}: {first["msg"]}; wanted one JSON object {{"id", "group", "prompt"}} a line'
                ) from None
            if prompt.id in places:
                raise ValueError(f"{place}: prompt id {prompt.id!r} was already used at {places[prompt.id]}; rename it")
            places[prompt.id] = place
            prompts.append(prompt)
    if not prompts:
        raise ValueError("no prompts found; give at least one .jsonl file with one question a line")
    return prompts


def deal_rounds(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Deal the prompts into rounds that hold one prompt of every group, so that each round is a fair mix."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.group].append(prompt)
    return [[prompt for prompt in row if prompt is not None] for row in zip_longest(*groups.values())]
