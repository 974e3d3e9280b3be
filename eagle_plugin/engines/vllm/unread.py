"""The tokens of plain rounds that the head has not read yet: it reads them at once when it drafts again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from eagle_plugin.engines.vllm.attention import ExtendRows

# Rows kept per request. Each has the target's states that the head reads, 3 * hidden size in EAGLE-3: for a target of
# hidden size 4096 in bfloat16 the rows of a request take at most 0.8 MB.
MOST_ROWS = 32


class PlainRows(NamedTuple):
    """One row per request of a plain round, as in `drafter.ExtendBatch`."""

    tokens: Tensor  # [b] int32
    positions: Tensor  # [b] int64
    features: Tensor  # [b, F]: the target's states


class Backlog(NamedTuple):
    """Rows of n requests for one forward of the head."""

    tokens: Tensor  # [r] int32
    positions: Tensor  # [r] int64
    features: Tensor  # [r, F]
    rows: ExtendRows
    slot_table: Tensor  # [n, S] int32


class UnreadRows:
    """What the head must read before it drafts for a request again, or before the request's blocks are free."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[PlainRows, int]]] = {}
        self._tables: dict[str, Tensor] = {}  # [S] int32: a view of the slot table of the request's last plain round

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, request_ids: Sequence[str], rows: PlainRows, slot_table: Tensor) -> bool:
        """Keep the rows of a plain round, [b] in the order of the requests; whether one has as many as are kept."""
        most = 0
        for i, (name, table) in enumerate(zip(request_ids, slot_table.unbind(), strict=True)):
            kept = self._rows.setdefault(name, [])
            kept.append((rows, i))
            self._tables[name] = table
            most = max(most, len(kept))
        return most >= MOST_ROWS

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the rows of these requests."""
        for name in request_ids:
            self._rows.pop(name, None)
            self._tables.pop(name, None)

    def take(self, request_ids: Iterable[str]) -> Backlog | None:
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
        return Backlog(tokens, positions, features, rows, slot_table)
