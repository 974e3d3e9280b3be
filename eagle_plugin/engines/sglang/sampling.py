"""How the requests of a batch sample: their parameters, their random numbers, and the token after a prefill."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler

from eagle_plugin.engines.numbers import PREFILL, fresh_keys, no_proposals, root_tree
from eagle_plugin.kernels.sampling import SamplingParams, uniforms, verify_tree


def sampling_params(info: Any) -> SamplingParams:
    """The parameters of an SGLang ``SamplingBatchInfo``; the engine has already made temperature 0 top-k 1."""
    return SamplingParams(info.temperatures.view(-1), info.top_ks, info.top_ps, info.min_ps)


def random_keys(reqs: list[Any]) -> torch.Tensor:
    """One key a request [b] int64: its seed, or new random bits.

    With the committed length as the counter, a seeded request draws the same numbers whatever its batch, and no number
    is used twice: every round commits at least one token.
    """
    seeds = [req.sampling_params.sampling_seed for req in reqs]
    keys = fresh_keys(len(seeds))
    for i, seed in enumerate(seeds):
        if seed is not None:
            keys[i] = seed
    return keys


class SeededSampler(Sampler):
    """The engine's sampler, which draws the token after a prefill from the requests' seeds when the batch has any.

    The engine itself knows seeds only under --enable-deterministic-inference.
    """

    _keys: torch.Tensor | None = None

    def seed(self, reqs: list[Any]) -> None:
        """Draw the next tokens for these requests, in this order; requests without a seed draw anew."""
        seeded = any(req.sampling_params.sampling_seed is not None for req in reqs)
        self._keys = random_keys(reqs) if seeded else None

    def _sample_from_probs(
        self, probs: torch.Tensor, sampling_info: Any, positions: torch.Tensor, simple_sampling_case: bool
    ) -> Any:
        if self._keys is None:
            return super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        params = sampling_params(sampling_info)
        tokens = draw_tokens(
            probs.float().log(),  # the temperature is in it already
            params._replace(temperatures=torch.ones_like(params.temperatures)),
            uniforms(self._keys, positions.long(), PREFILL, 1),
        )
        return tokens.int(), None


def draw_tokens(logits: torch.Tensor, params: SamplingParams, u: torch.Tensor) -> torch.Tensor:
    """One token a row [b] int64 from logits [b, V] float32; u [b, 1] float64."""
    return verify_tree(
        root_tree(torch.zeros(len(u), dtype=torch.int64)), logits, params, no_proposals(len(u)), u[:, None], 1
    ).tokens[:, 0]
