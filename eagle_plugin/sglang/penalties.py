"""Penalties after every node of a draft tree: the tokens on the path to a node count as generated there.

The engine's own penalizers hold one set of counts per request and add one token per round, which is right only where a
round yields one token. Here the counts are in tables on the device, by row of the engine's request table, and a round
adds its own tokens: nothing is read from the host, which knows a round's tokens one round late under overlap
scheduling.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.penalties import Penalties, count_tokens, penalize_nodes
from eagle_plugin.runtime.host_to_device import values_to_device
from eagle_plugin.sglang.batch import RoundBatch

STOPS = 8  # places for the tokens that end a request; more are made where a request has more


class NodePenalties:
    """Frequency, presence and repetition penalties and minimal lengths of all requests of one worker.

    The tables are made when the first request with any of these comes; they take 4 bytes per row and token of the
    vocabulary, as one of the engine's own penalizers does.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device | str) -> None:
        """rows: of the engine's request table."""
        self._rows, self._vocabulary, self._device = rows, vocabulary, torch.device(device)
        self._tables: Penalties | None = None

    def start(self, batch: Any) -> None:
        """Read what the requests of an extending SGLang ``ScheduleBatch`` ask for; their counts begin anew.

        A request that was retracted and now resumes has output already, which counts. For such a request the penalties
        that the engine will apply to the token after this prefill are put right: the engine starts it with empty
        counts. batch is inside a forward: its ``sampling_info`` holds the accumulated penalties [b, V].
        """
        if self._tables is None:
            if not any(map(_asks, batch.reqs)):
                return
            self._tables = self._new_tables()
        tables = self._tables
        rows = batch.req_pool_indices.long()
        strengths = self._tensor([_strengths(request) for request in batch.reqs], torch.float32)
        for i, table in enumerate((tables.frequency, tables.presence, tables.repetition)):
            table[rows] = strengths[:, i]
        tables.min_lens[rows] = self._tensor([_min_len(request) for request in batch.reqs], torch.int64)
        tables = self._set_stops(rows, [_stop_tokens(request) if _min_len(request) else [] for request in batch.reqs])
        tables.counts[rows] = 0
        resumed = [request.output_ids for request in batch.reqs]
        if any(resumed):
            longest = max(map(len, resumed))
            tokens = self._tensor([[*ids, *[0] * (longest - len(ids))] for ids in resumed], torch.int64)
            count_tokens(tables.counts, rows, tokens, self._tensor(list(map(len, resumed)), torch.int32))
        self._correct_the_engines(batch)

    def count_prefill(self, batch: Any, tokens: Tensor) -> None:
        """Count the token [b] that the prefill of `start` has yielded for each request."""
        if self._tables is None:
            return
        ones = torch.ones(len(tokens), dtype=torch.int32, device=self._device)
        count_tokens(self._tables.counts, batch.req_pool_indices.long(), tokens.long()[:, None], ones)

    def apply(self, batch: RoundBatch, tree: DraftTree, logits: Tensor) -> None:
        """Penalise the logits after every node, in place; to be called before the grammar's mask and the bias.

        tree [b, W]; logits [b * W, V] float32 with node j of request i in row i * W + j. Rows of requests without
        penalties stay as they are.
        """
        assert self._tables is not None, "a penalised request has not been started"
        b = len(tree.tokens)
        penalize_nodes(
            logits, tree.tokens, tree.ancestors, tree.depths, batch.requests[:b], batch.prefix_lens[:b], self._tables
        )

    def count(self, batch: RoundBatch, accepted: Accepted) -> None:
        """Count the tokens of a round; accepted has b requests."""
        if self._tables is not None:
            b = len(accepted.lengths)
            count_tokens(self._tables.counts, batch.requests[:b], accepted.tokens, accepted.lengths)

    def _new_tables(self) -> Penalties:
        def table(fill: float, dtype: torch.dtype, *columns: int) -> Tensor:
            return torch.full((self._rows, *columns), fill, dtype=dtype, device=self._device)

        return Penalties(
            counts=table(0, torch.int32, self._vocabulary),
            frequency=table(0, torch.float32),
            presence=table(0, torch.float32),
            repetition=table(1, torch.float32),
            stops=table(-1, torch.int64, STOPS),
            min_lens=table(0, torch.int64),
        )

    def _set_stops(self, rows: Tensor, stops: list[list[int]]) -> Penalties:
        tables = self._tables
        assert tables is not None
        width = tables.stops.shape[1]
        more = max(map(len, stops)) - width
        if more > 0:
            wider = torch.nn.functional.pad(tables.stops, (0, more), value=-1)
            self._tables = tables = tables._replace(stops=wider)
            width += more
        tables.stops[rows] = self._tensor([[*ids, *[-1] * (width - len(ids))] for ids in stops], torch.int64)
        return tables

    def _correct_the_engines(self, batch: Any) -> None:
        additive = batch.sampling_info.acc_additive_penalties
        scaling = batch.sampling_info.acc_scaling_penalties
        for i, request in enumerate(batch.reqs):
            if additive is None or not request.output_ids:
                continue
            pairs = Counter(request.output_ids)
            tokens, times = self._tensor(list(pairs), torch.int64), self._tensor(list(pairs.values()), torch.float32)
            frequency, presence, repetition = _strengths(request)
            additive[i] = 0.0
            additive[i, tokens] = -(frequency * times + presence)
            if int(request.sampling_params.min_new_tokens) > len(request.output_ids):
                additive[i, self._tensor(_stop_tokens(request), torch.int64)] = -torch.inf
            if scaling is not None:
                scaling[i] = 1.0
                scaling[i, tokens] = repetition

    def _tensor(self, values: Any, dtype: torch.dtype) -> Tensor:
        """Host values on the device, without waiting for it."""
        return values_to_device(values, dtype, self._device)


def penalised(batch: Any) -> bool:
    """Whether a request of this ``ScheduleBatch`` has penalties or is still below its minimal length.

    Under overlap scheduling the host knows a request's length one round late: such a request may be past it already,
    and then nothing happens to its logits. batch is inside a forward, for which the engine has accumulated its own
    penalties if any request has some: without them no request is looked at.
    """
    return batch.sampling_info.acc_additive_penalties is not None and any(
        _strengths(request) != _NO_STRENGTHS or int(request.sampling_params.min_new_tokens) > len(request.output_ids)
        for request in batch.reqs
    )


_NO_STRENGTHS = (0.0, 0.0, 1.0)


def _strengths(request: Any) -> tuple[float, float, float]:
    p = request.sampling_params
    return p.frequency_penalty, p.presence_penalty, p.repetition_penalty


def _asks(request: Any) -> bool:
    return _strengths(request) != _NO_STRENGTHS or bool(_min_len(request))


def _min_len(request: Any) -> int:
    """A node at depth d may not be followed by a token that ends the request while L + d is below this; 0: it may.

    The root is output number L + 1 - (length of the prompt), so the token after a node of depth d comes after
    L + 1 - prompt + d tokens of output.
    """
    minimum = int(request.sampling_params.min_new_tokens)
    return len(request.origin_input_ids) + minimum - 1 if minimum else 0


def _stop_tokens(request: Any) -> list[int]:
    """The tokens that end this request, by the engine's rule."""
    tokenizer = request.tokenizer
    stops = {*(request.sampling_params.stop_token_ids or ()), *(request.eos_token_ids or ())}
    stops |= {*(tokenizer.additional_stop_token_ids or ()), tokenizer.eos_token_id} - {None}
    return sorted(stops)
