"""How the requests of a batch sample: their parameters and their random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.runtime.host_to_device import to_device
from eagle_plugin.runtime.rng import key_of_seed
from eagle_plugin.vllm.logits import min_ps

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


class RequestDraws:
    """How the requests of a worker draw tokens. vLLM makes new metadata whenever a batch changes, never else.

    A request keeps its key from the first step that asks for it to its end: what was drafted by it is drawn by it. All
    ranks ask for the same requests in the same order, so that they have the same keys.
    """

    def __init__(self, vocabulary: int, device: torch.device, seed: int, engine: int = 0) -> None:
        """seed: of the keys of requests without a seed of their own; engine: the index of data parallelism. The engines
        of a server have the same seed and must not draw alike."""
        self._vocabulary, self._device = vocabulary, device
        self._random = random.Random(f"{seed} of engine {engine}" if engine else seed)
        self._keys: dict[str, int] = {}
        self._metadata: Any = None
        self._params: SamplingParams
        self._of_batch: Tensor | None = None

    def of(self, metadata: Any, request_ids: Sequence[str]) -> tuple[SamplingParams, Tensor | None]:
        """The parameters of a vLLM ``SamplingMetadata`` and keys [b] int64; None where all take the most likely."""
        if metadata is not self._metadata:
            b = len(request_ids)
            self._params = sampling_params(metadata, min_ps(metadata, b), b, self._vocabulary, self._device)
            self._of_batch = None if metadata.all_greedy else self._read(metadata.generators, request_ids)
            self._metadata = metadata
        return self._params, self._of_batch

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended."""
        for name in request_ids:
            self._keys.pop(name, None)

    def _read(self, generators: Mapping[int, torch.Generator], request_ids: Sequence[str]) -> Tensor:
        for i, name in enumerate(request_ids):
            if name not in self._keys:
                # vLLM keeps a seed as the generator that it made from it.
                seed = generators[i].initial_seed() if i in generators else self._random.getrandbits(64)
                self._keys[name] = key_of_seed(seed)
        (keys,) = to_device([np.array([self._keys[name] for name in request_ids])], self._device)
        return keys
