"""Extraction: runs the target over batches of token rows and writes its hidden states to a feature store.

Which rows are in a batch, and which batches in a shard, follows from the row file and the options alone. So a shard has
the same bytes whether or not the run was interrupted before it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eagle_plugin.learning.data.dialogues import join_turns
from eagle_plugin.learning.data.masks import MaskReport
from eagle_plugin.learning.data.rows import MIN_RESPONSE, DataError, TokenRow, read_rows
from eagle_plugin.learning.data.store.batch_queue import BatchQueue, StatesBatch
from eagle_plugin.learning.data.store.feature_store import ROWS_CHANGED, FeatureWriter
from eagle_plugin.learning.data.store.features import Taps
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.shards import Layout

MAX_LENGTH, BATCH_TOKENS = 2048, 4096  # unless the user says otherwise
WINDOW_BATCHES = 64  # rows for this many batches are read and sorted by length: little padding, bounded memory


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


def select_rows(
    rows: Iterable[TokenRow], earlier: set[str], max_length: int, stats: ExtractionStats
) -> Iterator[TokenRow]:
    """The rows that are planned, cut on the right to max_length tokens; the others are counted.

    Left out are documents that earlier runs have put into the store, and rows with fewer than MIN_RESPONSE response
    tokens after cutting.
    """
    for row in rows:
        response = row.response_ids[: max(0, max_length - len(row.prompt_ids))]
        if len(response) >= MIN_RESPONSE and row.id not in earlier:
            yield replace(row, response_ids=response)
            continue
        stats.kept += row.id in earlier
        stats.dropped += row.id not in earlier
        stats.skipped_tokens += min(_length(row), max_length)


def form_shards(
    rows: Iterable[TokenRow], manifest: Manifest, batch_tokens: int, shard_bytes: int
) -> Iterator[list[list[TokenRow]]]:
    """Group selected rows to batches, and whole batches to shards of shard_bytes or more; the last one may be smaller.

    The same rows give the same batches: the neighbours of a row in its batch, which change its states in the last bits,
    do not depend on what was extracted before. A batch has at most batch_tokens tokens including padding, or one row.
    """
    shard: list[list[TokenRow]] = []
    size = 0
    for batch in form_batches(rows, batch_tokens):
        shard.append(batch)
        size += sum(Layout.of(manifest, _length(row)).size for row in batch)
        if size >= shard_bytes:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


def extract(
    taps: Taps, shards: Iterable[list[list[TokenRow]]], writer: FeatureWriter, stats: ExtractionStats
) -> Generator[None, None, None]:
    """Write those of the planned shards that are missing; `stats` is updated before the yield after every batch.

    A batch is written while the next ones are computed (`BatchQueue`); `close` waits for those that are computed.

    Raises:
        DataError: a token id is beyond the target's vocabulary, the rows are not those that were planned, or a shard
            cannot be written.
    """
    started = time.perf_counter()
    with BatchQueue(writer, taps.readout.weight.device) as queue:
        for batches, name in itertools.zip_longest(shards, writer.names):
            if batches is None or name is None:
                raise DataError(ROWS_CHANGED)
            if name not in writer.missing:
                stats.kept += sum(map(len, batches))
                stats.skipped_tokens += sum(_length(row) for batch in batches for row in batch)
                yield
                continue
            for number, batch in enumerate(batches, 1):
                lengths = [_length(row) for row in batch]
                ids = _pad(batch, lengths, taps.readout.weight.shape[0])
                finished = name if number == len(batches) else None
                # The states have no name here: on a GPU they are freed as soon as they are copied.
                queue.put(StatesBatch(batch, lengths, ids, *taps.run(ids, lengths)), finished)
                stats.done += len(batch)
                stats.tokens += sum(lengths)
                stats.padded += ids.numel()
                stats.seconds = time.perf_counter() - started
                yield
    stats.seconds = time.perf_counter() - started


def _pad(batch: Sequence[TokenRow], lengths: Sequence[int], vocabulary: int) -> Tensor:
    """The tokens of a batch, padded on the right: [rows, longest] int64."""
    ids = torch.zeros(len(batch), lengths[0], dtype=torch.int64)
    for place, row in enumerate(batch):
        ids[place, : lengths[place]] = torch.tensor(row.prompt_ids + row.response_ids)
    if int(ids.max()) >= vocabulary:
        raise DataError(
            f"a row holds token {int(ids.max())}, and the target's vocabulary ends at {vocabulary - 1}; "
            "generate the rows with this target"
        )
    return ids


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
    """Read and check all rows; returns how many documents, and tokens after cutting, this rank has.

    Raises:
        DataError: two rows have one id, or the rows' masks cannot be right (`masks.MaskReport`).
    """
    seen: set[str] = set()
    masks = MaskReport()
    total = tokens = 0

    def checked() -> Iterator[TokenRow]:
        for row in read_rows(path):
            if row.id in seen:
                raise DataError(f"{path} has two rows with id {row.id!r}; give every row its own id")
            seen.add(row.id)
            masks.add(row, allow=allow_odd_masks)
            yield row

    for k, row in enumerate(join_turns(checked(), max_length)):
        if k % world == rank:
            total += 1
            tokens += min(_length(row), max_length)
    if not seen:
        raise DataError(f"{path} holds no rows; generate some with `eagle-plugin data generate`")
    masks.check_mean(allow=allow_odd_masks)
    return total, tokens
