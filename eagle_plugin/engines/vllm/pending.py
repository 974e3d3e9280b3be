"""Tokens of plain rounds that the head has not read: kept, and read in one forward when drafting starts again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from eagle_plugin.core.costs import PENDING_TOKENS
from eagle_plugin.engines.vllm.attention import ExtendRows

MOST_BYTES = 2**28  # of all requests' states


class PlainRows(NamedTuple):
    """One row per request of a plain round, as in `drafter.ExtendBatch`."""

    tokens: Tensor  # [b] int32
    positions: Tensor  # [b] int64
    features: Tensor  # [b, F]: the target's states


class PendingRows(NamedTuple):
    """Those of n requests, for one forward of the head."""

    tokens: Tensor  # [r] int32
    positions: Tensor  # [r] int64
    features: Tensor  # [r, F]
    rows: ExtendRows
    slot_table: Tensor  # [n, S] int32


class PendingTokens:
    """What the head must read before it drafts for a request again, or before the request's blocks are free."""

    def __init__(self, most_requests: int) -> None:
        self._most_requests = most_requests
        self._rows: dict[str, list[tuple[PlainRows, int]]] = {}
        self._tables: dict[str, Tensor] = {}  # [S] int32: a view of the slot table of the request's last plain round

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, request_ids: Sequence[str], rows: PlainRows, slot_table: Tensor) -> bool:
        """Keep the rows of a plain round, [b] in the order of the requests; whether one has as many as may be kept."""
        row_bytes = rows.features.shape[1] * rows.features.element_size()
        allowed = max(1, min(PENDING_TOKENS, MOST_BYTES // (self._most_requests * row_bytes)))
        most = 0
        for i, (name, table) in enumerate(zip(request_ids, slot_table.unbind(), strict=True)):
            kept = self._rows.setdefault(name, [])
            kept.append((rows, i))
            self._tables[name] = table
            most = max(most, len(kept))
        return most >= allowed

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the rows of these requests."""
        for name in request_ids:
            self._rows.pop(name, None)
            self._tables.pop(name, None)

    def take(self, request_ids: Iterable[str]) -> PendingRows | None:
        """The rows of these requests, which are no longer kept then; None where there are none."""
        names = [name for name in request_ids if name in self._rows]
        if not names:
            return None
        entries = [self._rows[name] for name in names]
        tables = [self._tables[name] for name in names]
        self.forget(names)
        one_by_one = [PlainRows(*(x[i : i + 1] for x in rows)) for kept in entries for rows, i in kept]
        tokens, positions, features = (torch.cat(parts) for parts in zip(*one_by_one, strict=True))
        device = tokens.device
        lens = torch.tensor([len(kept) for kept in entries], device=device)
        ends = lens.cumsum(0)
        requests = torch.arange(len(names), device=device)
        rows = ExtendRows(requests, positions[ends - 1] + 1, lens, ends - lens)
        longest = max(len(table) for table in tables)
        slot_table = torch.stack([pad(table, (0, longest - len(table))) for table in tables])
        return PendingRows(tokens, positions, features, rows, slot_table)
