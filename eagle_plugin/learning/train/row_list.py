"""Token rows as the documents of a run: their order, lengths and terms, without hidden states."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from eagle_plugin.learning.data.dialogues import answers_of, join_turns, response_mask
from eagle_plugin.learning.data.provenance import Sources, Terms, count_sources, join_sources, read_sources
from eagle_plugin.learning.data.rows import MIN_RESPONSE, Split, TokenRow, read_rows
from eagle_plugin.learning.train.recipe import TrainError


@dataclass(frozen=True)
class Item:
    """What the order of an epoch needs to know of a document."""

    id: str
    split: str
    length: int  # tokens
    weight: float  # how often an epoch takes it


class ListedRow(NamedTuple):
    """One row, in 4 bytes per token: there may be 10^9 of them."""

    id: str
    source: str
    split: Split
    ids: array[int]  # of prompt and answer
    prompt: int  # tokens before the last answer
    answers: tuple[tuple[int, int], ...]  # begin and end of each, in tokens

    def mask(self) -> Tensor:
        """[n] bool: tokens of answers."""
        return response_mask(self.answers, len(self.ids))


class RowList:
    """The rows of files that become documents, cut to `max_length` tokens, one for all turns of a dialogue.

    Raises:
        TrainError: two rows have one id, or a row has a token beyond `vocab_size`.
    """

    def __init__(self, paths: Iterable[Path], vocab_size: int, max_length: int) -> None:
        self.rows: list[ListedRow] = []
        self.items: list[Item] = []
        self.terms: Sources = {}
        seen: set[str] = set()
        for path in paths:
            known = read_sources(path)
            for row in join_turns(self._checked(path, known, seen, vocab_size), max_length):
                length = min(len(row.prompt_ids) + len(row.response_ids), max_length)
                if length - len(row.prompt_ids) >= MIN_RESPONSE:
                    ids = array("I", (row.prompt_ids + row.response_ids)[:length])
                    answers = tuple((begin, min(end, length)) for begin, end in answers_of(row))
                    self.rows.append(ListedRow(row.id, row.source, row.split, ids, len(row.prompt_ids), answers))
                    self.items.append(Item(row.id, row.split, length, 1.0))

    def _checked(self, path: Path, known: Sources, seen: set[str], vocab_size: int) -> Iterator[TokenRow]:
        for row in read_rows(path):
            terms = known.get(row.source, Terms())
            if self.terms.get(row.source) != terms:
                self.terms = join_sources(self.terms, {row.source: terms})
            if row.id in seen:
                raise TrainError(f"{path} has row {row.id!r} a second time; give every row its own id")
            seen.add(row.id)
            if max((*row.prompt_ids, *row.response_ids), default=0) >= vocab_size:
                raise TrainError(
                    f"{path}: row {row.id!r} has a token beyond the target's vocabulary of {vocab_size:,}; "
                    "generate the rows with this target"
                )
            yield row

    def count(self) -> dict[str, dict[str, Any]]:
        """The documents of split train by source, as `count_sources` returns them."""
        pairs = [pair for pair in zip(self.rows, self.items, strict=True) if pair[0].split == "train"]
        counted = ((row.source, item.length, sum(end - begin for begin, end in row.answers)) for row, item in pairs)
        return count_sources(counted, self.terms)
