"""Several turns of one dialogue as one row, where the tokens of each turn begin with those of the turn before it.

Each turn of a dialogue is a row, whose prompt repeats all turns before. Their states are the same, so one document with
a mask over all answers is enough: of a dialogue of ten turns of equal length, 18 % of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from eagle_plugin.learning.data.rows import MIN_RESPONSE, TokenRow, prompt_id_of, read_rows


@dataclass(frozen=True)
class DialogueRow(TokenRow):
    """The last turn of a dialogue; its prompt has answers that are trained on, too."""

    earlier: tuple[tuple[int, int], ...] = ()  # begin and end of each, in tokens, in their order


def read_dialogues(path: str | Path, max_length: int) -> Iterator[TokenRow]:
    """The rows of a file, as `join_turns` gives them; raises as `read_rows`."""
    return join_turns(read_rows(path), max_length)


def join_turns(rows: Iterable[TokenRow], max_length: int) -> Iterator[TokenRow]:
    """Join rows that follow each other and are turns of one dialogue; the others stay as they are.

    A turn is joined to the one before it if its prompt begins with prompt and answer of that one and has more tokens,
    and if some of its answer is within `max_length` tokens. So the same answers are trained on as without this.
    """
    last: TokenRow | None = None
    for row in rows:
        if last is not None and _continues(last, row, max_length):
            answer = len(last.prompt_ids), len(last.prompt_ids) + len(last.response_ids)
            row = DialogueRow(**{one.name: getattr(row, one.name) for one in fields(row)}, earlier=(*_of(last), answer))
        elif last is not None:
            yield last
        last = row
    if last is not None:
        yield last


def answers_of(row: TokenRow) -> list[tuple[int, int]]:
    """Begin and end of each answer of a row, in tokens."""
    begin = len(row.prompt_ids)
    return [*_of(row), (begin, begin + len(row.response_ids))]


def response_mask(answers: Iterable[tuple[int, int]], n: int) -> Tensor:
    """[n] bool: the tokens of the answers, each given by its begin and end."""
    mask = torch.zeros(n, dtype=torch.bool)
    for begin, end in answers:
        mask[begin:end] = True
    return mask


def _of(row: TokenRow) -> tuple[tuple[int, int], ...]:
    return row.earlier if isinstance(row, DialogueRow) else ()


def _continues(last: TokenRow, row: TokenRow, max_length: int) -> bool:
    same = (last.source, last.split, prompt_id_of(last.id)) == (row.source, row.split, prompt_id_of(row.id))
    if not same or last.id == row.id or len(row.prompt_ids) + MIN_RESPONSE > max_length:
        return False
    before = len(last.prompt_ids) + len(last.response_ids)
    # With no token between two answers the draft steps of the first one would go on in the second one.
    return len(row.prompt_ids) > before and row.prompt_ids[:before] == last.prompt_ids + last.response_ids
