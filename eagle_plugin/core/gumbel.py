"""Drafts and draws that share their noise: the draft guesses the target's own draw, at every temperature.

Each token of a request is drawn as the one with the highest log p + noise, where the noise depends on nothing but the
request's key, the position and the token. So drawn, tokens have the distribution p (Gumbel-max). A draft that adds the
same noise to the head's log q often finds the same maximum (coupling without communication: Daliri et al., arXiv
2408.07978; lists of drafts: Rowan et al., arXiv 2506.05632). The children of a node are the best tokens of log q +
noise, and their softmax is the probability that the target draws them, as the head sees it.

Whatever is drafted, a walk goes to the child that the target draws, and the text is what the target draws. It is a
function of the key alone, and no decision of a draft can change it: also what was drawn may decide what is drafted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core.propose import tempered
from eagle_plugin.core.rng import random_bits
from eagle_plugin.core.sampling import Filters, SamplingParams, kept_prefix, target_distribution
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted, verify_greedy

NOISE = 3  # stream of `core.rng`, beside those of `runtime.rng`

# Of log q beside the noise. A head is trained on all contexts that look alike to it, so that its q is flatter than the
# target's p in any of them (benchmarks/acceptance.py --sharpness).
SHARPNESS = 1.2


def gumbel_noise(rng_keys: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The noise of tokens [n, m] int64 that may come after these positions; [n, m] float64, from -3.2 to 22.9.

    rng_keys [n] and positions [n] int64. Numbers of 32 bits: a token of a probability below 2^-32 is never drawn.
    """
    bits = torch.stack(random_bits(rng_keys, positions, NOISE, tokens >> 2), dim=-1)  # four tokens share a block
    own = bits.gather(-1, (tokens & 3)[..., None])[..., 0]
    return -(-((own.double() + 0.5) * 2.0**-32).log()).log()


def propose_coupled(
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

    logp, index and draft_to_target are those of `core.propose.propose`; params, rng_keys and positions have one row for
    each of the R rows, the position of the node whose children these are. Greedy rows get the most likely tokens, with
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


def draw_coupled(
    logits: Tensor, params: SamplingParams, rng_keys: Tensor, positions: Tensor, filters: Filters = "joint"
) -> Tensor:
    """The token [R] int64 that the target draws after each row; logits and params as for `target_distribution`.

    rng_keys [R] and positions [R] int64, of the rows. At temperature 0 the argmax.
    """
    p = target_distribution(logits, params, filters)
    tokens = torch.arange(p.shape[1], device=p.device).expand(len(p), -1)
    return (p.log() + gumbel_noise(rng_keys, positions, tokens)).argmax(dim=1)


def verify_coupled(
    tree: DraftTree,
    logits: Tensor,
    params: SamplingParams,
    rng_keys: Tensor,
    lengths: Tensor,
    max_accept_length: int,
    *,
    filters: Filters = "joint",
) -> Accepted:
    """Walk each tree to the child that the target draws, as long as there is one; the rest as of `verify_tree`.

    params, rng_keys [b] int64 and lengths [b] int64 (the position of the root) are of b requests.
    """
    b, width = tree.tokens.shape
    positions = (lengths[:, None] + tree.depths).view(-1)
    drawn = draw_coupled(logits, params.for_rows(width), rng_keys.repeat_interleave(width), positions, filters)
    return verify_greedy(tree.tokens, tree.parents, drawn.view(b, width), max_accept_length)
