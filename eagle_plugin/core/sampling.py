"""From the target's logits to the distribution that a request samples from.

Temperature first, then top-k, top-p and min-p, as each engine's own samplers apply them:

- "joint", SGLang's: one sort, and every filter uses the probabilities before any filter
  (``top_k_top_p_min_p_sampling_from_probs_torch`` and FlashInfer's order of that name).
- "chained", vLLM's: each filter uses what the filter before it left: min-p, then top-k, then top-p
  (``MinPLogitsProcessor``, ``apply_top_k_top_p_pytorch``).

Tokens of equal probability are ordered by their id.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Filters = Literal["joint", "chained"]


TOP_K_OFF = 2**30  # more than any vocabulary


class SamplingParams(NamedTuple):
    """How each request draws a token from its logits; rows may be requests or nodes.

    `csrc/bindings/sampling_params.h` has the same fields in the same order.
    """

    temperatures: Tensor  # [b] float32, above 0
    top_ks: Tensor  # [b] int32; 1 is greedy, the vocabulary size or more is off
    top_ps: Tensor  # [b] float32; 1 is off
    min_ps: Tensor  # [b] float32; 0 is off

    @classmethod
    def of(
        cls,
        n: int,
        temperature: float = 1.0,
        *,
        top_k: int = TOP_K_OFF,
        top_p: float = 1.0,
        min_p: float = 0.0,
        device: torch.device | str = "cpu",
    ) -> SamplingParams:
        """n requests alike; temperature 0 is greedy."""
        return cls(
            torch.full((n,), temperature or 1.0, device=device),
            torch.full((n,), top_k if temperature else 1, dtype=torch.int32, device=device),
            torch.full((n,), top_p, device=device),
            torch.full((n,), min_p, device=device),
        )

    @classmethod
    def greedy(cls, n: int, device: torch.device | str = "cpu") -> SamplingParams:
        """n requests that take the most likely token; all filters are off."""
        return cls.of(n, 0.0, device=device)

    def is_greedy(self) -> Tensor:
        """Whether each request takes the most likely token, [b] bool."""
        return self.top_ks == 1

    def rows(self, index: slice | Tensor) -> SamplingParams:
        """The parameters of these rows."""
        return SamplingParams(*(values[index] for values in self))

    def for_rows(self, n: int) -> SamplingParams:
        """The parameters of n rows per request, [b * n]; row i * n + j is row j of request i."""
        return SamplingParams(*(values.repeat_interleave(n) for values in self))


def check_filters(filters: str) -> None:
    """ValueError unless this is the name of a meaning of the filters."""
    if filters not in get_args(Filters):
        raise ValueError(f"filters is {filters!r}, wanted 'joint' (SGLang's meaning) or 'chained' (vLLM's)")


def kept_prefix(p: Tensor, params: SamplingParams) -> Tensor:
    """How many of the most likely tokens pass the joint filters, [R] int64, at least 1.

    p [R, n] float, descending: the probabilities before any filter, of which the n best are given.
    """
    ranks = torch.arange(p.shape[1], device=p.device)
    before = p.cumsum(dim=1) - p
    kept = (ranks < params.top_ks[:, None]) & (before <= params.top_ps[:, None].to(p.dtype))
    kept &= p >= p[:, :1] * params.min_ps[:, None].to(p.dtype)
    kept[:, 0] = True
    return kept.sum(dim=1)  # every filter keeps a prefix


def chained_prefix(p: Tensor, params: SamplingParams) -> Tensor:
    """How many of the most likely tokens pass the chained filters, [R] int64, at least 1; 1 where top-k is 1.

    p [R, V] float64, descending: the probabilities before any filter. Min-p keeps p >= min_p * max p; top-k keeps what
    is at least the k-th of all, ties included; top-p keeps a token if the mass before it is less than top_p of the
    mass that the earlier filters left.
    """
    kth = (params.top_ks.long() - 1).clamp(max=p.shape[1] - 1)
    kept = (p >= p[:, :1] * params.min_ps[:, None].double()) & (p >= p.gather(1, kth[:, None]))
    p = torch.where(kept, p, 0.0)
    before, top_ps = p.cumsum(dim=1) - p, params.top_ps[:, None].double()
    kept &= (before < top_ps * p.sum(dim=1, keepdim=True)) | (top_ps >= 1)
    kept &= ~params.is_greedy()[:, None]
    kept[:, 0] = True
    return kept.sum(dim=1)  # every filter keeps a prefix


def target_distribution(logits: Tensor, params: SamplingParams, filters: Filters = "joint") -> Tensor:
    """Return p [R, V] float64, the distribution that row r of params draws from logits[r].

    logits [R, V] float32 after penalties, grammar mask and bias. filters: "joint" (SGLang's) or "chained" (vLLM's), see
    the top of this file; ValueError for any other. Greedy rows have all their mass on the argmax, the lowest id among
    equals. NaN counts as impossible; a row without any possible token is uniform.

    Where several tokens have exactly the same logit, vLLM's own samplers differ. Here:

    - At the border of top-p the lowest ids are kept, as in its Triton kernel; its torch sort on a CPU keeps any of
      them.
    - Ties at the k-th logit are all kept, as in its torch samplers; its Triton kernel keeps k tokens, the lowest ids.
    - top_k 1 is greedy here, hence one token; vLLM draws from all that tie at the maximum unless temperature is 0.
    """
    check_filters(filters)
    x = logits.double()
    x = torch.where(x.isnan(), -torch.inf, x)
    highest = x.amax(dim=1, keepdim=True)
    x = torch.where(x == highest, 0.0, (x - highest) / params.temperatures[:, None].double())
    p = x.softmax(dim=1)
    # Sorted by logit, not by p: where p underflows to 0 the logits still say which is the better token.
    order = x.sort(dim=1, descending=True, stable=True).indices
    p_sorted = p.gather(1, order)
    ranks = torch.arange(p.shape[1], device=p.device)
    kept = kept_prefix(p_sorted, params) if filters == "joint" else chained_prefix(p_sorted, params)
    p_sorted = torch.where(ranks < kept[:, None], p_sorted, 0.0)
    p = torch.zeros_like(p).scatter_(1, order, p_sorted)
    return p / p.sum(dim=1, keepdim=True)
