"""Penalties after every node of a draft tree: the tokens on the path to a node count as generated there.

The engine's own penalizers hold one set of counts per request and add one token per round, which is right only where a
round yields one token. Here the counts come from the request's output; the root of a tree is its last token.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from eagle_plugin.core.tree import DraftTree


class NodePenalties:
    """Frequency, presence and repetition penalties and minimal lengths of all requests of one worker.

    It needs a scheduler that knows the tokens of a round before the next one starts (on CPUs it always does): they are
    read from ``Req.output_ids``. A request's counts live as long as the request.
    """

    def __init__(self) -> None:
        self._times: WeakKeyDictionary[Any, Counter[int]] = WeakKeyDictionary()

    def apply(self, batch: Any, tree: DraftTree, logits: Tensor) -> None:
        """Penalise the logits after every node, in place; to be called before the grammar's mask and the bias.

        batch is a decoding SGLang ``ScheduleBatch`` of b requests, tree its draft trees [b, W], logits [b * W, V]
        float32 with node j of request i in row i * W + j. Rows of requests without penalties stay as they are.
        """
        b, width = tree.tokens.shape
        nodes = logits.view(b, width, -1)
        for i, request in enumerate(batch.reqs):
            if _has_strengths(request):
                self._apply_strengths(request, tree.tokens[i].long(), tree.ancestors[i], nodes[i])
            missing = _missing_tokens(request)
            if missing > 0:
                rows, stops = nodes[i], _stop_tokens(request, nodes.device)
                rows[:, stops] = rows[:, stops].masked_fill(tree.depths[i, :, None] < missing, -torch.inf)

    def apply_after_prefill(self, batch: Any) -> None:
        """Let the engine penalise the token that a prefill yields for a request with output (retracted, now resumed).

        The engine starts such a request with empty counts. batch is an extending ``ScheduleBatch`` inside a forward:
        its ``sampling_info`` holds the accumulated penalties [b, V] that the engine will apply, corrected in place.
        """
        additive = batch.sampling_info.acc_additive_penalties
        scaling = batch.sampling_info.acc_scaling_penalties
        for i, request in enumerate(batch.reqs):
            if additive is None or not request.output_ids:
                continue
            tokens, times = self._output(request, additive.device)
            offsets, factors = _strengths(request, times)
            additive[i] = 0.0
            additive[i, tokens] = -offsets
            if _missing_tokens(request) > 0:
                additive[i, _stop_tokens(request, additive.device)] = -torch.inf
            if scaling is not None:
                scaling[i] = 1.0
                scaling[i, tokens] = factors

    def _apply_strengths(self, request: Any, drafted: Tensor, ancestors: Tensor, rows: Tensor) -> None:
        """Penalise the logits rows [W, V] of one request at the tokens that its output or its tree [W] holds."""
        generated, times = self._output(request, rows.device)
        tokens = torch.cat([generated, drafted])  # [n + W]; equal ones get equal values
        committed = torch.cat([times, (drafted[:, None] == generated).float() @ times])
        on_path = (ancestors[:, None] >> torch.arange(len(drafted), device=rows.device)) & 1  # [W, W]: (node, ancestor)
        on_path[:, 0] = 0  # the root is in the output
        offsets, factors = _strengths(request, committed + on_path.float() @ (drafted[:, None] == tokens).float())
        lowered = rows[:, tokens] - offsets
        rows[:, tokens] = torch.where(lowered < 0, lowered * factors, lowered / factors)

    def _output(self, request: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        """The different tokens of a request's output [n] int64, and how often it has each [n] float32."""
        times = self._times.get(request)
        if times is None or times.total() > len(request.output_ids):  # new, or started again from nothing
            times = self._times[request] = Counter()
        times.update(request.output_ids[times.total() :])
        pairs = torch.tensor([list(times), list(times.values())], dtype=torch.int64).to(device, non_blocking=True)
        return pairs[0], pairs[1].float()


def penalised(batch: Any) -> bool:
    """Whether a request of this ``ScheduleBatch`` has penalties or is still below its minimal length."""
    return any(_has_strengths(request) or _missing_tokens(request) > 0 for request in batch.reqs)


def _has_strengths(request: Any) -> bool:
    p = request.sampling_params
    return p.frequency_penalty != 0.0 or p.presence_penalty != 0.0 or p.repetition_penalty != 1.0


def _strengths(request: Any, times: Tensor) -> tuple[Tensor, Tensor]:
    """What is subtracted from the logit of a token that was generated so many times, and the factor for the rest."""
    p = request.sampling_params
    offsets = p.frequency_penalty * times + p.presence_penalty * (times > 0)
    return offsets, torch.where(times > 0, p.repetition_penalty, 1.0)


def _missing_tokens(request: Any) -> int:
    """How many more tokens the request must yield before it may end."""
    return int(request.sampling_params.min_new_tokens) - len(request.output_ids)


def _stop_tokens(request: Any, device: torch.device) -> Tensor:
    """The tokens that end this request, by the engine's rule: [s] int64."""
    tokenizer = request.tokenizer
    stops = {*(request.sampling_params.stop_token_ids or ()), *(request.eos_token_ids or ())}
    stops |= {*(tokenizer.additional_stop_token_ids or ()), tokenizer.eos_token_id} - {None}
    return torch.tensor(sorted(stops), dtype=torch.int64).to(device, non_blocking=True)
