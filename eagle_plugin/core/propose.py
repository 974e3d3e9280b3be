"""The children of a draft node: the tokens that the target is most likely to draw next, by the noise of that draw."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core.gumbel import gumbel_noise
from eagle_plugin.core.sampling import SamplingParams, kept_prefix

MAX_TOP_M = 128  # M: most likely tokens of a row that children are chosen from

# Of log q beside the noise. A head is trained on all contexts that look alike to it, so that its q is flatter than the
# target's p in any of them (benchmarks/acceptance.py --sharpness).
SHARPNESS = 1.2


def propose(
    logp: Tensor,
    index: Tensor,
    params: SamplingParams,
    rng_keys: Tensor,
    positions: Tensor,
    k: int,
    draft_to_target: Tensor | None = None,
    sharpness: float = SHARPNESS,
) -> tuple[Tensor, Tensor]:
    """Choose the k children of each row: scores [R, k] float32, at most 0 and descending, and tokens [R, k] int64.

    logp [R, M] float32 (descending, natural logarithm of the head's softmax at temperature 1) and index [R, M] int64
    (draft vocabulary) are the M most likely tokens of each row, M >= k; draft_to_target [draft vocabulary] int64 maps
    to target ids (None: the same ids). params, rng_keys [R] int64 and positions [R] int64 (of the nodes whose children
    these are) have one row for each of the R rows. Greedy rows get the most likely tokens, with
    their log-probability at temperature 1. A token that the filters leave out has the score -inf.
    """
    tokens = index if draft_to_target is None else draft_to_target[index]
    q = tempered(logp, params.temperatures)
    kept = torch.arange(q.shape[1], device=q.device) < kept_prefix(q, params)[:, None]
    noised = sharpness * q.log() + gumbel_noise(rng_keys, positions, tokens)
    noised = noised.masked_fill(~kept, -torch.inf)
    greedy = params.is_greedy()[:, None]
    scores = torch.where(greedy, logp.double(), noised.log_softmax(dim=1))
    # Sorted by what was compared: equal scores come in the order of the head's list.
    order = torch.where(greedy, logp.double(), noised).sort(dim=1, descending=True, stable=True).indices[:, :k]
    return scores.gather(1, order).clamp(max=0).float(), tokens.gather(1, order)


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
