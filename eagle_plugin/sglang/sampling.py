"""How the requests of a batch sample: their parameters, their random numbers, and the token after a prefill."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler

from eagle_plugin.core.tree import DraftTree
from eagle_plugin.kernels.sampling import SamplingParams, verify_tree


def sampling_params(info: Any) -> SamplingParams:
    """The parameters of an SGLang ``SamplingBatchInfo``; the engine has already made temperature 0 top-k 1."""
    return SamplingParams(info.temperatures.view(-1), info.top_ks, info.top_ps, info.min_ps)


def request_seeds(reqs: list[Any]) -> dict[int, int]:
    """The seeds of SGLang ``Req`` objects, by their place; requests without one are not in it."""
    seeds = {i: req.sampling_params.sampling_seed for i, req in enumerate(reqs)}
    return {i: seed for i, seed in seeds.items() if seed is not None}


class SeededSampler(Sampler):
    """The engine's sampler, which draws the token after a prefill from the requests' seeds when the batch has any.

    The engine itself knows seeds only under --enable-deterministic-inference.
    """

    _keys: torch.Tensor | None = None

    def use_keys(self, keys: torch.Tensor | None) -> None:
        """Draw the next tokens by these keys [b] int64, one per request; None: as the engine does."""
        self._keys = keys

    def _sample_from_probs(
        self, probs: torch.Tensor, sampling_info: Any, positions: torch.Tensor, simple_sampling_case: bool
    ) -> Any:
        if self._keys is None:
            return super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        params = sampling_params(sampling_info)
        tokens = draw_tokens(
            probs.float().log(),  # the temperature is in it already
            params._replace(temperatures=torch.ones_like(params.temperatures)),
            self._keys,
            positions.long(),
        )
        return tokens.int(), None


def draw_tokens(
    logits: torch.Tensor, params: SamplingParams, keys: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One token per row [b] int64 from logits [b, V] float32, after these positions [b] int64."""
    roots = DraftTree.padding(torch.zeros_like(keys), 1)
    return verify_tree(roots, logits, params, keys, positions, 1).tokens[:, 0]
