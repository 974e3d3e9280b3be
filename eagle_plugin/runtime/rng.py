"""The random numbers of a decode round: functions of a request's key and a position in it, in both engines.

The noise of a draw belongs to the position after which it draws (`core.gumbel`): a request gets the same token there
whatever was drafted. So the text of a seed depends neither on its batch nor on the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from eagle_plugin.core.synthetic import UNIFORMS
from eagle_plugin.kernels.sampling import uniforms
from eagle_plugin.runtime.host_to_device import tensor_to_device

SYNTHETIC = 2  # stream of one (key, position), beside `core.gumbel.NOISE`


def key_of_seed(seed: int) -> int:
    """The key of a request with this seed: the seed modulo 2^64, as an int64."""
    return (seed + 2**63) % 2**64 - 2**63


def request_keys(b: int, seeds: Mapping[int, int], generator: torch.Generator | None = None) -> Tensor:
    """One key per request, [b] int64: that of its seed where `seeds` has one, else 64 new random bits."""
    rng_keys = torch.randint(-(2**63), 2**63 - 1, (b,), generator=generator)
    for i, seed in seeds.items():
        rng_keys[i] = key_of_seed(seed)
    return rng_keys


class KeyTable:
    """The keys of all requests of one worker, on its device: a decode round reads them without the host.

    A request keeps its key from its prefill to its end, so that its rounds need no new random bits: the counter, a
    position, is another one in each.
    """

    def __init__(self, rows: int, device: torch.device | str, seed: int) -> None:
        """rows: of the engine's request table. Workers with the same `seed` draw the same keys."""
        self.table = torch.zeros(rows, dtype=torch.int64, device=device)
        self._random = torch.Generator().manual_seed(seed)

    def draw(self, rows: Tensor, seeds: Mapping[int, int]) -> None:
        """Give new keys to the requests in these rows [b] int64; request i of them has the seed seeds[i], if any."""
        self.table[rows] = tensor_to_device(request_keys(len(rows), seeds, generator=self._random), rows.device)

    def of(self, rows: Tensor) -> Tensor:
        """The keys of the requests in these rows, [b] int64."""
        return self.table[rows]


def synthetic_uniforms(rng_keys: Tensor, lengths: Tensor) -> Tensor:
    """Numbers for the length and the end of a synthetic path, [b, 2] float64.

    rng_keys [b] int64; lengths [b] int64: the position of the root.
    """
    return uniforms(rng_keys, lengths, SYNTHETIC, UNIFORMS)
