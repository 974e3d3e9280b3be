"""Keeps the tokens of plain rounds that the head has not read, until it reads them when drafting starts again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.accepted_path import read_path
from eagle_plugin.policy.costs import DEFERRED_TOKENS
from eagle_plugin.runtime.capturing import powers_of_two
from eagle_plugin.runtime.deferred_limit import most_deferred
from eagle_plugin.runtime.round import HeadState, TopM
from eagle_plugin.runtime.round_costs import has_room
from eagle_plugin.sglang.batch import BatchReader, RoundBatch
from eagle_plugin.sglang.drafter import DraftState, TreeDrafter

MOST_TOKENS = 128  # per request: what is left of an answer when it ends is never read


class DeferredTokens:
    """The last tokens of each row of the engine's request table, and the target's states before them.

    The host knows how many plain rounds there were; how many tokens of them a request has, which may have begun later,
    is known on the device only.
    """

    def __init__(self, rows: int, state: Tensor) -> None:
        """rows: of the engine's request table; state: one row of the target's states."""
        self.most = min(MOST_TOKENS, most_deferred(rows * state.nbytes))
        device = state.device
        self._counts = torch.zeros(rows, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(rows, self.most, dtype=torch.int64, device=device)
        self._states = torch.zeros(rows, self.most, *state.shape, dtype=state.dtype, device=device)
        self.rounds = 0  # plain rounds since the head read last: no request has more tokens

    def longest(self, requests: Sequence[Any]) -> int:
        """No SGLang ``Req`` of these has more tokens; the host's count, which may be too large.

        A request has none after its prefill, which yields its first output token. With overlap scheduling the host
        has one token less by then.
        """
        if not self.rounds:
            return 0
        return min(self.rounds, self.most, max((len(one.output_ids) for one in requests), default=0))

    def forget(self, requests: Tensor) -> None:
        """The head has read all of these requests, rows [b] int64 of the table: a prefill, or a drafted round."""
        self._counts[requests] = 0

    def clear(self) -> None:
        """As `forget`, for all rows."""
        self._counts.zero_()
        self.rounds = 0

    def add(self, batch: RoundBatch, accepted: Accepted, states: Tensor) -> None:
        """Keep the token of a plain round of each request, and the target's states [B, F] at the roots."""
        rows = batch.requests
        place = self._counts[rows].clamp(max=self.most - 1)
        self._tokens[rows, place] = accepted.tokens[:, 0]
        self._states[rows, place] = states
        self._counts[rows] = place + 1

    def read(
        self, schedule_batch: Any, reader: BatchReader, drafter: TreeDrafter, state: DraftState, longest: int
    ) -> DraftState:
        """Let the head read the tokens of all requests of a batch; the state that a drafted round begins with.

        state: what the requests began their last round with. A request without deferred tokens keeps it. longest: no
        request has more tokens; there is one forward per `DEFERRED_TOKENS` of them.
        """
        rows = schedule_batch.req_pool_indices.long()
        counts, self.rounds = self._counts[rows], 0
        for first in range(0, longest, DEFERRED_TOKENS):
            part = slice(first, min(first + DEFERRED_TOKENS, longest))
            state = self._read_some(schedule_batch, reader, drafter, state, counts - first, part)
        self.forget(rows)
        return state

    def read_padding(
        self, reader: BatchReader, drafter: TreeDrafter, most: int, in_any_rank: Callable[[bool], bool] = bool
    ) -> None:
        """Run the forwards of `read` once over padding, so that no request waits until their kernels are compiled.

        most: requests of the largest batch. The largest forward has no more rows than are kept of states at all; where
        memory ends in any rank before that, the rest is left out.
        """
        nothing = torch.zeros(1, dtype=torch.int64, device=self._counts.device)
        for b, tokens in padding_sizes(most, min(DEFERRED_TOKENS, self.most)):
            rows = nothing.expand(b)
            batch = reader.padding(Shape.chain(tokens - 1), b, is_greedy=True)
            lengths = torch.ones_like(rows, dtype=torch.int32)
            values = self._tokens[rows, :tokens], self._states[rows, :tokens]
            if in_any_rank(not has_room(partial(_extend, batch, drafter, lengths, *values))):
                return

    def _read_some(
        self,
        schedule_batch: Any,
        reader: BatchReader,
        drafter: TreeDrafter,
        state: DraftState,
        left: Tensor,
        part: slice,
    ) -> DraftState:
        """One forward over these places; left [b] is each request's tokens from there on, below 1 if it has none."""
        rows = schedule_batch.req_pool_indices.long()
        b, longest = len(rows), part.stop - part.start
        counts = left.clamp(0, longest)
        lengths = schedule_batch.seq_lens.long() - left.clamp(min=0)
        batch = reader.read(Shape.chain(longest - 1), schedule_batch, b, lengths)
        places = torch.arange(batch.start.slots.shape[1], device=rows.device)
        # The slots after the committed tokens are reserved for the caps of a round, and there may be fewer.
        batch.start.slots.masked_fill_(places >= counts[:, None], 0)
        tokens, states = self._tokens[rows, part], self._states[rows, part]
        found = _extend(batch, drafter, counts.clamp(min=1).int(), tokens, states)
        has_read = (counts > 0)[:, None]
        top = TopM(*(torch.where(has_read, new, old) for new, old in zip(found.head.top, state.head.top, strict=True)))
        return DraftState(HeadState(top, torch.where(has_read, found.head.hidden, state.head.hidden)), state.roots)


def padding_sizes(most: int, most_tokens: int) -> list[tuple[int, int]]:
    """Requests and rows per request whose forwards use every kernel that those of up to `most` requests use.

    Attention has kernels for numbers of rows per request up to each power of two, and others for every number of
    stretches of a prefix, which falls with the rows of the whole batch.
    """
    sizes, tokens = {*powers_of_two(most), most}, {*powers_of_two(most_tokens), most_tokens}
    return [(b, n) for n in sorted(tokens) for b in sorted(sizes)]


def _extend(batch: RoundBatch, drafter: TreeDrafter, lengths: Tensor, tokens: Tensor, states: Tensor) -> DraftState:
    """Let the head read lengths [B] int32 tokens of each request, of tokens [B, n] after the states [B, n, F]."""
    index = torch.zeros_like(tokens, dtype=torch.int32)
    accepted = Accepted(index, lengths, tokens)
    path = read_path(accepted, batch.prefix_lens, 1)
    return drafter.extend(batch, accepted, path, states.flatten(0, 1))
