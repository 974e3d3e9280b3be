"""How the requests of a batch sample: their parameters and their random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.runtime import rng

GREEDY_BELOW = 1e-5  # vLLM's `_SAMPLING_EPS`: requests of a lower temperature are greedy


def sampling_params(
    metadata: Any, min_ps: Tensor | None, b: int, vocabulary: int, device: torch.device
) -> SamplingParams:
    """The parameters of a vLLM ``SamplingMetadata`` of b requests; min_ps [b] float32 or None."""

    def given(values: Tensor | None, otherwise: float, dtype: torch.dtype) -> Tensor:
        return torch.full((b,), otherwise, dtype=dtype, device=device) if values is None else values[:b].to(dtype)

    temperatures = given(metadata.temperature, 0.0, torch.float32)
    greedy = temperatures < GREEDY_BELOW
    return SamplingParams(
        temperatures.masked_fill(greedy, 1.0),
        given(metadata.top_k, vocabulary, torch.int32).masked_fill(greedy, 1),
        given(metadata.top_p, 1.0, torch.float32),
        given(min_ps, 0.0, torch.float32),
    )


class KnownParams:
    """The parameters of the batch at hand: vLLM makes new metadata whenever a batch changes, never else."""

    def __init__(self) -> None:
        self._metadata: Any = None
        self._params: SamplingParams

    def of(self, metadata: Any, make: Callable[[], SamplingParams]) -> SamplingParams:
        """What `make` gave for this ``SamplingMetadata``."""
        if metadata is not self._metadata:
            self._params, self._metadata = make(), metadata
        return self._params


def request_keys(generators: Mapping[int, torch.Generator], b: int, device: torch.device) -> Tensor:
    """One key per request [b] int64; vLLM keeps a seed as the generator that it made from it."""
    return rng.request_keys(b, {i: generator.initial_seed() for i, generator in generators.items()}, device)


def seeded(metadata: Any, b: int, device: torch.device) -> Tensor:
    """Which of the b requests of a vLLM ``SamplingMetadata`` have a seed and a temperature above 0, [b] bool."""
    marks = torch.zeros(b, dtype=torch.bool, device=device)
    for i in metadata.generators:
        marks[i] = True
    return marks


def draft_params(metadata: Any, b: int, vocabulary: int, device: torch.device) -> SamplingParams:
    """The parameters to draft by, of b requests."""
    params = sampling_params(metadata, None, b, vocabulary, device)
    if metadata.generators:
        params = rng.without_sampled_children(params, seeded(metadata, b, device))
    return params


def draft_draws(
    known: KnownParams, metadata: Any, b: int, vocabulary: int, device: torch.device, chains: Tensor | None
) -> tuple[SamplingParams, Tensor | None]:
    """How b requests draft: their parameters, and their keys [b] int64, None where all are greedy.

    chains [b] bool: requests whose drafts must be chains; None without any.
    """
    params = known.of(metadata, lambda: draft_params(metadata, b, vocabulary, device))
    if chains is not None:  # a chain is made of first children; sampled ones come after them
        params = rng.without_sampled_children(params, chains)
    return params, None if metadata.all_greedy else request_keys(metadata.generators, b, device)
