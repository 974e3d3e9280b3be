"""Extraction: runs the target over batches of token rows and writes its hidden states to a feature store."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from eagle_plugin.data.masks import MaskReport
from eagle_plugin.data.rows import DataError, TokenRow, read_rows
from eagle_plugin.data.store.feature_store import Document, FeatureWriter
from eagle_plugin.data.store.features import Taps

WINDOW_BATCHES = 64  # rows for this many batches are read and sorted by length: little padding, bounded memory
MIN_RESPONSE = 2  # a head reads one response token and predicts the next


@dataclass
class ExtractionStats:
    """Counts of the rows of one rank."""

    done: int = 0  # documents extracted by this run
    tokens: int = 0
    padded: int = 0  # tokens and padding
    kept: int = 0  # documents that were in the store before
    dropped: int = 0  # rows with fewer than MIN_RESPONSE response tokens after cutting
    skipped_tokens: int = 0  # of kept and dropped rows
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def extract(
    taps: Taps,
    rows: Iterable[TokenRow],
    writer: FeatureWriter,
    stats: ExtractionStats,
    max_length: int,
    batch_tokens: int,
) -> Iterator[None]:
    """Write the documents of rows to a store; `stats` is updated before the yield after every batch.

    Rows are cut on the right to max_length tokens, and dropped if fewer than MIN_RESPONSE response tokens are left.
    A batch has at most batch_tokens tokens including padding, or it is a single row.

    Raises:
        DataError: a token id is beyond the target's vocabulary.
    """
    started = time.perf_counter()
    for batch in form_batches(_usable(rows, writer.done, stats, max_length), batch_tokens):
        lengths = [_length(row) for row in batch]
        ids = torch.zeros(len(batch), lengths[0], dtype=torch.int64)
        for place, row in enumerate(batch):
            ids[place, : lengths[place]] = torch.tensor(row.prompt_ids + row.response_ids)
        if int(ids.max()) >= taps.readout.weight.shape[0]:
            raise DataError(
                f"a row holds token {int(ids.max())}, and the target's vocabulary ends at "
                f"{taps.readout.weight.shape[0] - 1}; generate the rows with this target"
            )
        aux, last = taps.run(ids, lengths)
        aux, last = None if aux is None else aux.cpu(), last.cpu()
        for place, (row, n) in enumerate(zip(batch, lengths, strict=True)):
            mask = torch.arange(n) >= len(row.prompt_ids)
            own_aux = None if aux is None else aux[place, :n]
            writer.add(Document(row.id, row.source, row.split, ids[place, :n], mask, own_aux, last[place, :n]))
        stats.done += len(batch)
        stats.tokens += sum(lengths)
        stats.padded += ids.numel()
        stats.seconds = time.perf_counter() - started
        yield


def _usable(rows: Iterable[TokenRow], done: set[str], stats: ExtractionStats, max_length: int) -> Iterator[TokenRow]:
    """The rows that must be run, cut to max_length; the others are counted."""
    for row in rows:
        response = row.response_ids[: max(0, max_length - len(row.prompt_ids))]
        if len(response) >= MIN_RESPONSE and row.id not in done:
            yield replace(row, response_ids=response)
            continue
        stats.kept += row.id in done
        stats.dropped += row.id not in done
        stats.skipped_tokens += min(_length(row), max_length)


def form_batches(rows: Iterable[TokenRow], batch_tokens: int) -> Iterator[list[TokenRow]]:
    """Group rows of similar length, longest first; the number of rows times the longest is at most batch_tokens."""

    def cut(window: list[TokenRow]) -> Iterator[list[TokenRow]]:
        batch: list[TokenRow] = []
        for row in sorted(window, key=_length, reverse=True):
            if batch and (len(batch) + 1) * _length(batch[0]) > batch_tokens:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    window, tokens = [], 0
    for row in rows:
        window.append(row)
        tokens += _length(row)
        if tokens >= WINDOW_BATCHES * batch_tokens:
            yield from cut(window)
            window, tokens = [], 0
    yield from cut(window)


def _length(row: TokenRow) -> int:
    return len(row.prompt_ids) + len(row.response_ids)


def survey_rows(
    path: str | Path, max_length: int, rank: int = 0, world: int = 1, allow_odd_masks: bool = False
) -> tuple[int, int]:
    """Read and check all rows; returns how many rows, and tokens after cutting, this rank has.

    Raises:
        DataError: two rows have one id, or the rows' masks cannot be right (`masks.MaskReport`).
    """
    seen: set[str] = set()
    masks = MaskReport()
    total = tokens = 0
    for k, row in enumerate(read_rows(path)):
        if row.id in seen:
            raise DataError(f"{path} has two rows with id {row.id!r}; give every row its own id")
        seen.add(row.id)
        masks.add(row, allow=allow_odd_masks)
        if k % world == rank:
            total += 1
            tokens += min(_length(row), max_length)
    if not seen:
        raise DataError(f"{path} holds no rows; generate some with `eagle-plugin data generate`")
    masks.check_mean(allow=allow_odd_masks)
    return total, tokens
