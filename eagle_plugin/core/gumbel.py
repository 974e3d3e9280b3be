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

from eagle_plugin.core.rng import random_bits
from eagle_plugin.core.sampling import Filters, SamplingParams, target_distribution

NOISE = 3  # stream of `core.rng`, beside those of `runtime.rng`


def gumbel_noise(rng_keys: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The noise of tokens [n, m] int64 that may come after these positions; [n, m] float64, from -3.2 to 22.9.

    rng_keys [n] and positions [n] int64. Numbers of 32 bits: a token of a probability below 2^-32 is never drawn.
    """
    bits = torch.stack(random_bits(rng_keys, positions, NOISE, tokens >> 2), dim=-1)  # four tokens share a block
    return _gumbel(bits.gather(-1, (tokens & 3)[..., None])[..., 0])


def noise_of_all(rng_keys: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """`gumbel_noise` of the tokens 0 .. vocabulary - 1; [n, vocabulary] float64."""
    blocks = torch.arange((vocabulary + 3) // 4, device=rng_keys.device).expand(len(rng_keys), -1)
    bits = torch.stack(random_bits(rng_keys, positions, NOISE, blocks), dim=-1)
    return _gumbel(bits.reshape(len(rng_keys), -1)[:, :vocabulary])


def _gumbel(bits: Tensor) -> Tensor:
    return -(-((bits.double() + 0.5) * 2.0**-32).log()).log()


def draw_tokens(
    logits: Tensor, params: SamplingParams, rng_keys: Tensor, positions: Tensor, filters: Filters = "joint"
) -> Tensor:
    """The token [R] int64 that the target draws after each row; logits and params as for `target_distribution`.

    rng_keys [R] and positions [R] int64, of the rows. At temperature 0 the argmax.
    """
    p = target_distribution(logits, params, filters)
    return (p.log() + noise_of_all(rng_keys, positions, p.shape[1])).argmax(dim=1)
