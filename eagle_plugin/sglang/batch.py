"""Copies what a decode round reads of SGLang's batch into static memory, once, so that the scheduler may go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.kernels.round_start import RoundStart, start_round
from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.runtime.graphs import StaticMemory
from eagle_plugin.runtime.host_to_device import to_device
from eagle_plugin.runtime.rng import KeyTable
from eagle_plugin.runtime.round import TreeRows
from eagle_plugin.sglang.pools import SlidingReader, SlidingRows
from eagle_plugin.sglang.sampling import sampling_params


class RoundBatch(NamedTuple):
    """One decode round of b requests, padded to B; L is a request's committed length, its root comes after it.

    Rows b .. B - 1 are padding: one token long, in the engine's cache slot 0, which holds nothing.
    """

    shape: Shape
    b: int
    is_greedy: bool  # all requests take the argmax
    start: RoundStart  # of the padded batch
    table_rows: Tensor  # [B] int64: 0 .. B - 1, the rows of start.table
    sliding: SlidingRows | None = None  # of layers with a sliding window, where these have a pool of their own
    # [B] int64, of targets with rotary positions of three axes: what a request's texts are ahead of its tokens, since
    # an image takes fewer positions than it has tokens.
    shifts: Tensor | None = None
    # Its functions run without graphs even where a batch of this size has some: these would read the static memory of a
    # captured round, and this one's drafts and logits are not there.
    is_eager: bool = False

    def first(self, b: int) -> RoundBatch:
        """The same round of the first b requests alone, for functions without graphs: views."""
        if b == self.padded_b:
            return self
        start = self.start
        return self._replace(
            is_eager=True,
            start=RoundStart(
                start.prefix_lens[:b],
                start.requests[:b],
                start.rng_keys[:b],
                start.slots[:b],
                start.table[:b],
                SamplingParams(*(values[:b] for values in start.sampling)),
            ),
            table_rows=self.table_rows[:b],
            sliding=None if self.sliding is None else SlidingRows(*(values[:b] for values in self.sliding)),
            shifts=None if self.shifts is None else self.shifts[:b],
        )

    @property
    def padded_b(self) -> int:
        """B."""
        return len(self.table_rows)

    @property
    def prefix_lens(self) -> Tensor:
        """L, [B] int64."""
        return self.start.prefix_lens

    @property
    def requests(self) -> Tensor:
        """Row of the request-to-token table, [B] int64."""
        return self.start.requests

    @property
    def rng_keys(self) -> Tensor:
        """Of the requests' random numbers, [B] int64."""
        return self.start.rng_keys

    @property
    def sampling(self) -> SamplingParams:
        """Of the padded batch."""
        return self.start.sampling

    def window(self, first: int, count: int) -> Tensor:
        """The cache slots of `count` positions from L + first on, contiguous [B, count] int64."""
        return self.start.window(first, count)

    def rotary_axes(self, positions: Tensor) -> Tensor:
        """The positions [3, N] of rows of text, N / B for each request, for their places [N] in it.

        Without shifts the target has one axis and only the head has three, as where it was trained beside images.
        """
        if self.shifts is None:
            return positions.view(1, -1).repeat(3, 1)
        return (positions.view(self.padded_b, -1) + self.shifts[:, None]).view(1, -1).repeat(3, 1)

    def tree_rows(self, ancestors: Tensor, tail: int) -> TreeRows:
        """Rows with these ancestors [B, R] over `tail` slots after L, for tree attention over `start.table`."""
        return TreeRows(self.table_rows, self.prefix_lens, ancestors, tail)


class BatchReader:
    """Reads batches into memory that keeps its address."""

    def __init__(
        self,
        reach: int,
        most: int,
        req_to_token: Tensor,
        keys: KeyTable,
        sliding: SlidingReader | None = None,
        has_axes: bool = False,
        least: int = 0,
    ) -> None:
        """Room for up to `most` requests; req_to_token [P, C] int32 is the engine's table.

        reach: of the largest shape (`Shape.reach`). sliding: of a target with a pool for its sliding windows.
        has_axes: of a target whose rotary positions have three. least: slots after the committed tokens that every
        round reads, of whatever shape.
        """
        self._sliding, self._has_axes, self._least = sliding, has_axes, least
        device, columns = req_to_token.device, req_to_token.shape[1]
        self._req_to_token, self._keys, self._columns = req_to_token, keys, columns
        self._memory = memory = StaticMemory(device)
        for name in ("prefix_lens", "requests", "rng_keys", *(("shifts",) if has_axes else ())):
            memory.allocate(name, most, torch.int64)
        memory.allocate("slots", most * reach, torch.int64)
        memory.allocate("table", most * columns, torch.int32)
        memory.allocate_fields("sampling", SamplingParams.greedy(most, device))
        self._table_rows = torch.arange(most, device=device)

    def read(self, shape: Shape, batch: Any, padded_b: int, lengths: Tensor | None = None) -> RoundBatch:
        """Read an SGLang ``ScheduleBatch`` whose decode slots are allocated, padded to `padded_b` requests.

        lengths [b] int64: L, if not that of the batch.
        """
        info = batch.sampling_info
        made = self._batch(shape, len(batch.seq_lens), padded_b, info.is_all_greedy)
        start_round(
            made.start,
            batch.seq_lens.long() if lengths is None else lengths,
            batch.req_pool_indices.long(),
            self._req_to_token,
            self._keys.table,
            sampling_params(info),
        )
        if made.shifts is not None:
            self._read_shifts(made.shifts, batch.multimodal_inputs)
        return self._with_sliding(made)

    @staticmethod
    def _read_shifts(shifts: Tensor, inputs: Sequence[Any] | None) -> None:
        """Of SGLang's ``MultimodalInputs`` of a batch's requests, whose deltas are on the host."""
        shifts.zero_()
        if inputs and any(one is not None for one in inputs):
            deltas = [0 if one is None else int(one.mrope_position_delta) for one in inputs]
            shifts[: len(deltas)] = to_device([np.array(deltas)], shifts.device)[0]

    def padding(self, shape: Shape, padded_b: int, is_greedy: bool) -> RoundBatch:
        """A round without requests, for a capture."""
        made = self._batch(shape, 0, padded_b, is_greedy)
        nothing = torch.zeros(0, dtype=torch.int64, device=self._table_rows.device)
        sampling = SamplingParams.greedy(0, nothing.device)
        start_round(made.start, nothing, nothing, self._req_to_token, self._keys.table, sampling)
        return self._with_sliding(made)

    def _with_sliding(self, made: RoundBatch) -> RoundBatch:
        return made if self._sliding is None else made._replace(sliding=self._sliding.read(made.start))

    def _batch(self, shape: Shape, b: int, padded_b: int, is_greedy: bool) -> RoundBatch:
        view = self._memory.view
        start = RoundStart(
            view("prefix_lens", padded_b),
            view("requests", padded_b),
            view("rng_keys", padded_b),
            view("slots", padded_b, max(shape.reach, self._least)),
            view("table", padded_b, self._columns),
            self._memory.view_fields("sampling", SamplingParams, padded_b),
        )
        shifts = view("shifts", padded_b) if self._has_axes else None
        return RoundBatch(shape, b, is_greedy, start, self._table_rows[:padded_b], shifts=shifts)


def committed_tokens(batch: Any) -> int:
    """The tokens that the requests of this ``ScheduleBatch`` have in the cache, as far as the host knows by now."""
    return sum(request.kv.kv_committed_len for request in batch.reqs)
