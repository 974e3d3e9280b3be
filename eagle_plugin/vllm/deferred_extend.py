"""Keeps the tokens of plain steps that the head has not read, until it reads them in few forwards.

It reads them when drafting starts again, and when another request finds their blocks in the prefix cache. Most blocks
of requests that have ended are used anew before anybody finds them, so what they hold is never read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from eagle_plugin.runtime.deferred_limit import largest_first, most_deferred
from eagle_plugin.runtime.host_to_device import to_device
from eagle_plugin.vllm.attention import ExtendRows
from eagle_plugin.vllm.batch import RoundBatch
from eagle_plugin.vllm.cache_layout import keeps_all_tokens

Owner = str | int  # the name of a request, or a block


def given_blocks(scheduler_output: Any, group: int, size: int) -> tuple[set[int], set[int]]:
    """Blocks that requests get in a step: found in the prefix cache by a group of caches, and to be filled by any.

    size: positions of a block of the group.
    """
    cached = scheduler_output.scheduled_cached_reqs
    entered = [(new.num_computed_tokens, new.block_ids) for new in scheduler_output.scheduled_new_reqs]
    for name, n, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
        if blocks is not None:  # those of a request that ran before are all new
            entered.append((n if name in cached.resumed_req_ids else 0, blocks))
    found: set[int] = set()
    new: set[int] = set()
    for n, groups in entered:
        found.update(groups[group][: n // size])
        new.update(groups[group][n // size :])
        # The groups share one pool, and their caches the memory: what another group gets is no longer the head's.
        new.update(block for other, blocks in enumerate(groups) if other != group for block in blocks)
    return found, new


class PlainRows(NamedTuple):
    """The rows of a step without trees, those of each request one after another, as in `drafter.ExtendBatch`."""

    tokens: Tensor  # [N] int32: the token after each row
    features: Tensor  # [N, F]: the target's states

    @classmethod
    def after(cls, batch: RoundBatch, next_tokens: Tensor, input_ids: Tensor, features: Tensor) -> PlainRows:
        """The rows of a step; all but next_tokens, of b requests, are the target's, of its N query rows."""
        tokens = input_ids.roll(-1)
        tokens[batch.starts + batch.lens - 1] = next_tokens.to(tokens.dtype)
        return cls(tokens, features)


class DeferredRows(NamedTuple):
    """Rows of n requests, for one forward of the head."""

    tokens: Tensor  # [r] int32
    positions: Tensor  # [r] int64
    features: Tensor  # [r, F]
    rows: ExtendRows
    lens: list[int]  # rows.lens, on the host
    slot_table: Tensor  # [n, S] int32


@dataclass
class _Run:
    """Rows at consecutive positions."""

    first: int  # position of the first row
    places: list[int]  # of the rows in the store

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.first + len(self.places)

    def split(self, n: int) -> tuple[_Run, _Run]:
        """The first n rows, or all if there are fewer, and the others."""
        return _Run(self.first, self.places[:n]), _Run(min(self.first + n, self.end), self.places[n:])


@dataclass
class _Kept:
    """What a request or a block has: one run, and one more after each step in which vLLM asked for no drafts."""

    runs: list[_Run]
    slot_table: Tensor  # [S] int32: a view of that of the request's last plain step
    blocks: Sequence[int] = ()  # of a request: its blocks by vLLM's numbers, on the host

    @property
    def places(self) -> list[int]:
        """Those of all rows."""
        return [place for run in self.runs for place in run.places]

    @property
    def rows(self) -> int:
        """How many these are."""
        return sum(len(run.places) for run in self.runs)


class DeferredTokens:
    """What the head must read before it drafts for a request again, or before others use the blocks of one that ended.

    It is read into the blocks that its request had, so these must be the request's until then: `can_wait`. Its owners
    are requests by name, and of requests that are gone vLLM's blocks by number. What all of them have is limited
    together, by `deferred_limit.MOST_BYTES`, where `can_keep` and `excess` are asked before each `add`. What the limit
    does not count are the slot tables, 4 bytes per position of a request.
    """

    def __init__(self, block_size: int, group: int = 0, can_wait: bool = True) -> None:
        """block_size: positions of a block of the head's cache, which is in this one of vLLM's KV cache groups.

        can_wait: whether a request has its blocks until it ends. With a window vLLM gives those before it to others.
        """
        self.block_size, self._group, self.can_wait = block_size, group, can_wait
        self._kept: dict[Owner, _Kept] = {}
        self.rows_of_requests = 0  # of those that are not gone; asked in every step
        self._found: set[int] = set()  # blocks that requests found in the prefix cache after these were last filled
        self._tokens = torch.empty(0, dtype=torch.int32)  # the store; it grows
        self._features = torch.empty(0, 0)
        self._free: list[int] = []  # its places

    @classmethod
    def of_layers(cls, groups: Sequence[Any], layers: set[str]) -> DeferredTokens:
        """For a head with these layers; groups: vLLM's ``KVCacheGroupSpec``, one of which has them all."""
        i, own = next((i, group) for i, group in enumerate(groups) if not layers.isdisjoint(group.layer_names))
        return cls(own.kv_cache_spec.block_size, i, keeps_all_tokens(own.kv_cache_spec))

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def rows(self) -> int:
        """Of all requests, those that are gone included."""
        return len(self._tokens) - len(self._free)

    def add(
        self,
        request_ids: Sequence[str],
        firsts: Sequence[int],
        lens: Sequence[int],
        rows: PlainRows,
        slot_table: Tensor,
        requests: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the rows of a step, `lens` of each request from position `firsts` on; slot_table [b, S] int32.

        requests: what has the `block_ids` of each, vLLM's lists by group of caches, which it extends: in whose blocks
        the rows are is asked on the host. None: nobody finds blocks.
        """
        places = self._take_places(rows)
        (index,) = to_device([np.array(places)], rows.features.device)
        self._tokens[index], self._features[index] = rows.tokens, rows.features
        steps = zip(request_ids, firsts, lens, accumulate(lens), slot_table.unbind(), strict=True)
        for name, position, n, end, table in steps:
            kept = self._kept.setdefault(name, _Kept([], table))
            kept.slot_table = table
            kept.blocks = () if requests is None else requests[name].block_ids[self._group]
            if not kept.runs or kept.runs[-1].end != position:
                kept.runs.append(_Run(position, []))
            kept.runs[-1].places += places[end - n : end]
            self.rows_of_requests += n

    def forget(self, owners: Iterable[Owner]) -> None:
        """Drop the rows of these requests or blocks."""
        for owner in self._kept.keys() & set(owners):
            self._free += self._pop(owner).places

    def leave(self, request_ids: Iterable[str]) -> None:
        """Keep the rows of requests that are gone by their blocks; those after the last full block are dropped.

        Nobody finds a block that is not full.
        """
        size = self.block_size
        for name in self._kept.keys() & set(request_ids):
            kept = self._pop(name)
            full = kept.runs[-1].end // size * size
            table = kept.slot_table[:full].clone()  # not a view: it would keep the table of all requests
            blocks = kept.blocks[: full // size]
            self.forget(blocks[kept.runs[0].first // size :])  # others filled those before, and they may be unread
            for run in kept.runs:
                while run.places:
                    part, run = run.split(min(size - run.first % size, len(run.places)))
                    if part.first < full:
                        self._kept.setdefault(blocks[part.first // size], _Kept([], table)).runs.append(part)
                    else:
                        self._free += part.places

    def wanted_by_blocks(self, scheduler_output: Any, gone: Set[str]) -> list[Owner]:
        """Follow who gets which blocks in a step, before vLLM's runner does; what the head must read before the step.

        gone: requests that leave the batch. This must be told of every step.
        """
        self.leave(gone)
        found, new = given_blocks(scheduler_output, self._group, self.block_size)
        self.forget(new)
        self._found -= new
        self._found |= found
        wanted = self.of_blocks(found)
        if gone:  # who found these blocks in the step that filled them needs them read as well
            wanted += [owner for owner in self._kept if owner in self._found]
        return wanted

    def of_blocks(self, blocks: Set[int]) -> list[Owner]:
        """What has rows in these blocks, by vLLM's numbers; the oldest first."""
        size = self.block_size
        found: list[Owner] = []
        for owner, kept in self._kept.items() if blocks else ():
            if isinstance(owner, str):
                own = kept.blocks[kept.runs[0].first // size : -(-kept.runs[-1].end // size)]
                if not blocks.isdisjoint(own):
                    found.append(owner)
            elif owner in blocks:
                found.append(owner)
        return found

    @staticmethod
    def can_keep(parts: Sequence[Tensor]) -> bool:
        """Whether a step has no more rows than may be kept; parts [N, ...]: the target's states of its rows."""
        return len(parts[0]) <= most_deferred(sum(part.shape[1] * part.element_size() for part in parts))

    def excess(self, rows: PlainRows) -> list[Owner]:
        """What to read before the rows of a step are added, because there would be more than may be kept: blocks first,
        no more of them than it takes."""
        most = most_deferred(rows.features.shape[1] * rows.features.element_size()) - len(rows.features)
        over = self.rows - most
        chosen: list[Owner] = []
        for owner, kept in self._kept.items() if over > 0 else ():
            if over > 0 and not isinstance(owner, str):
                chosen.append(owner)
                over -= kept.rows
        if over > 0:
            counts = {owner: kept.rows for owner, kept in self._kept.items() if isinstance(owner, str)}
            chosen += largest_first(counts, most)
        return chosen

    def take(self, owners: Iterable[Owner], most_rows: int) -> list[DeferredRows]:
        """The rows of these requests or blocks, which are no longer kept then, in forwards of at most `most_rows`."""
        forwards: list[list[tuple[_Run, Tensor]]] = []
        room = 0
        for kept in [self._pop(owner) for owner in owners if owner in self._kept]:
            for run in kept.runs:
                while run.places:
                    if not room:
                        forwards.append([])
                        room = most_rows
                    part, run = run.split(room)
                    forwards[-1].append((part, kept.slot_table))
                    room -= len(part.places)
        return [self._rows_of(*zip(*parts, strict=True)) for parts in forwards]

    def _pop(self, owner: Owner) -> _Kept:
        kept = self._kept.pop(owner)
        if isinstance(owner, str):
            self.rows_of_requests -= kept.rows
        return kept

    def _rows_of(self, runs: Sequence[_Run], tables: Sequence[Tensor]) -> DeferredRows:
        """The rows of one forward; their places in the store are free then."""
        device = self._features.device
        places = [place for run in runs for place in run.places]
        planned = places, [run.first for run in runs], [len(run.places) for run in runs]
        index, firsts, lens = to_device([np.array(values) for values in planned], device)
        self._free += places
        starts = lens.cumsum(0) - lens
        shifts = (firsts - starts).repeat_interleave(lens, output_size=len(places))
        positions = torch.arange(len(places), device=device) + shifts
        longest = max(len(table) for table in tables)
        slot_table = torch.stack([pad(table, (0, longest - len(table))) for table in tables])
        rows = ExtendRows(torch.arange(len(runs), device=device), firsts + lens, lens, starts)
        return DeferredRows(self._tokens[index], positions, self._features[index], rows, planned[2], slot_table)

    def _take_places(self, rows: PlainRows) -> list[int]:
        """Free places of the store for these rows; it grows where it has too few."""
        n, size = len(rows.features), len(self._features)
        if n > len(self._free):
            most = most_deferred(rows.features.shape[1] * rows.features.element_size())
            larger = max(min(2 * size, most), self.rows + n)
            tokens = rows.tokens.new_empty(larger)
            features = rows.features.new_empty(larger, rows.features.shape[1])
            if size:
                tokens[:size], features[:size] = self._tokens, self._features
            self._tokens, self._features = tokens, features
            self._free = [*range(larger - 1, size - 1, -1), *self._free]
        taken = self._free[-n:][::-1]
        del self._free[-n:]
        return taken
