"""The children of a draft node at temperature > 0: the most likely tokens, and sampled ones drawn from the rest.

The rule that verifies them is `core.verify.verify_tree`, which also says why it is lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from eagle_plugin.core.sampling import SamplingParams, draw, kept_prefix

# Children of a node at temperature > 0 that are drawn instead of chosen. A slot competes for its place in the tree with
# this part of the probability mass that its token is drawn from. Chosen by accept length with a first head of a small
# model: at 1 the slots crowd out tokens that are accepted more often (benchmarks/acceptance.py --slot-weights).
SLOT_WEIGHTS = (0.4, 0.12)
NUM_SAMPLED = len(SLOT_WEIGHTS)  # S: sampled children per node

MAX_TOP_M = 128  # M: most likely tokens of a row that sampled children are drawn from


class Proposals(NamedTuple):
    """The distributions q' from which the sampled children of a round were drawn; P proposal rows per request."""

    tokens: Tensor  # [b, P, M] int64, target ids, ascending
    weights: Tensor  # [b, P, M] float32, q' of each token; all 0 in a row that drew nothing

    @classmethod
    def none(cls, b: int, device: torch.device | str = "cpu") -> Proposals:
        """The proposals of b trees without sampled children: no rows."""
        return cls(torch.empty(b, 0, 0, dtype=torch.int64, device=device), torch.empty(b, 0, 0, device=device))

    def take(self, index: Tensor) -> Proposals:
        """The proposals of these requests, in this order; index [n] int64."""
        return Proposals(*(values[index] for values in self))

    @classmethod
    def concatenate(cls, parts: Sequence[Proposals]) -> Proposals:
        """The requests of several proposals one after the other; all get the most rows and tokens of any part."""
        rows, top_m = (max(part.tokens.shape[dim] for part in parts) for dim in (1, 2))
        padded = [[pad(x, (0, top_m - x.shape[2], 0, rows - x.shape[1])) for x in part] for part in parts]
        return cls(*(torch.cat(values) for values in zip(*padded, strict=True)))


class Children(NamedTuple):
    """The children of each of R draft nodes: k deterministic ones, then the slots of the S sampled ones."""

    logp: Tensor  # [R, k + S] float32, log-probability of being accepted as the head sees it, at most 0
    tokens: Tensor  # [R, k + S] int64, target ids
    draws: Tensor  # [R, k + S] int32: proposal row that drew the child, -1 for a deterministic one or none
    q_tokens: Tensor  # [R, M] int64, see Proposals
    q_weights: Tensor  # [R, M] float32


def propose(
    logp: Tensor,
    index: Tensor,
    params: SamplingParams,
    uniforms: Tensor,
    k: int,
    *,
    first_row: int,
    rows_per_request: int,
    draft_to_target: Tensor | None = None,
    slot_weights: Sequence[float] = SLOT_WEIGHTS,
) -> Children:
    """Choose the children of each row: the k most likely tokens, and S drawn without replacement from q', the rest.

    S is the number of slot_weights; 0 is allowed.

    logp [R, M] float32 (descending, natural logarithm of the head's softmax at temperature 1) and index [R, M] int64
    (draft vocabulary) are the M most likely tokens of each row, M >= k; params has one row for each of the R rows;
    uniforms [R, S] float64. draft_to_target [draft vocabulary] int64 maps to target ids (None: the same ids). Row r is
    proposal row first_row + r % rows_per_request of its request.

    At temperature T the head's q is that of logits / T, filtered as the target will be. Greedy rows, and rows in
    which the filters keep at most k tokens, get no sampled child: the slot has probability 0. The drawn token never
    decides whether a child is kept: the score of slot i is slot_weights[i] of the mass of the rest, known before the
    draw.
    """
    R, M = logp.shape
    tokens = index if draft_to_target is None else draft_to_target[index]
    rows = (first_row + torch.arange(R, device=logp.device) % rows_per_request).int()
    columns = torch.arange(k + len(slot_weights), device=logp.device).clamp(max=M - 1)
    draws = torch.full((R, k + len(slot_weights)), -1, dtype=torch.int32, device=logp.device)
    scores, chosen, weights = logp[:, columns], tokens[:, columns], torch.zeros_like(logp)
    scores[:, k:] = -torch.inf

    q = tempered(logp, params.temperatures)
    kept = kept_prefix(q, params)
    total = torch.where(kept < M, q.where(torch.arange(M, device=q.device) < kept[:, None], 0.0).sum(dim=1), 1.0)
    for r in range(R):
        if bool(params.is_greedy()[r]):
            continue
        n = int(kept[r])
        scores[r, :k] = (q[r, :k] / total[r]).log().clamp(max=0).float()
        scores[r, n:] = -torch.inf
        rest = q[r, k:n]
        if not rest.sum() > 0:
            continue
        weights[r, k:n] = (rest / rest.sum()).float()
        undrawn = weights[r].double()
        for i, weight in enumerate(slot_weights):
            if not undrawn.sum() > 0:
                break
            drawn = draw(undrawn, float(uniforms[r, i]))
            undrawn[drawn] = 0
            scores[r, k + i] = (weight * rest.sum() / total[r]).log().clamp(max=0).float()
            chosen[r, k + i] = tokens[r, drawn]
            draws[r, k + i] = rows[r]
    order = tokens.argsort(dim=1)
    return Children(scores, chosen, draws, tokens.gather(1, order), weights.gather(1, order))


def tempered(logp: Tensor, temperatures: Tensor) -> Tensor:
    """Probabilities [R, M] float64 at each row's temperature, of tokens whose log-probability at temperature 1 is logp.

    logp [R, M] descending. The tokens that are not in the list are taken to be as flat as its last token: exact at
    temperature 1, nearly so at others. An error here can lower the accept length, never change the target distribution.
    """
    x, flat = logp.double(), 1.0 / temperatures.double()[:, None]
    missing = (1 - x.exp().sum(dim=1, keepdim=True)).clamp(min=0)
    highest = x[:, :1].clamp(min=-700)  # a row where all are -inf keeps probability 0
    weights = ((x - highest) * flat).exp()
    missing = missing * ((x[:, -1:] - highest) * flat).exp() / x[:, -1:].exp().clamp(min=torch.finfo(x.dtype).tiny)
    return weights / (weights.sum(dim=1, keepdim=True) + missing).clamp(min=torch.finfo(x.dtype).tiny)
