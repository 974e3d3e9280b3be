"""The random numbers of a decode round: functions of a request's key and a position in it, in both engines.

The numbers of a walk belong to the positions of its nodes. A node's position is passed once, by the token that is kept
after it, so no number is used twice; and a request that has no sampled children gets the same token at a position
whatever was drafted there. A seeded request is drafted so: its text depends neither on its batch nor on the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from eagle_plugin.core.propose import NUM_SAMPLED
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.synthetic import UNIFORMS
from eagle_plugin.kernels.sampling import SamplingParams, uniforms

DRAFT, VERIFY, SYNTHETIC = range(3)  # streams of one (key, position); they never share a number


def request_keys(
    b: int,
    seeds: Mapping[int, int],
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """One key per request, [b] int64: its seed (modulo 2^64) where `seeds` has one, else 64 new random bits."""
    rng_keys = torch.randint(-(2**63), 2**63 - 1, (b,), device=device, generator=generator)
    for i, seed in seeds.items():
        rng_keys[i] = (seed + 2**63) % 2**64 - 2**63
    return rng_keys


class KeyTable:
    """The keys of all requests of one worker, on its device: a decode round reads them without the host.

    A request keeps its key from its prefill to its end, so that its rounds need no new random bits: the counter, a
    position, is another one in each.
    """

    def __init__(self, rows: int, device: torch.device | str, seed: int) -> None:
        """rows: of the engine's request table. Workers with the same `seed` draw the same keys."""
        self.table = torch.zeros(rows, dtype=torch.int64, device=device)
        self.seeded = torch.zeros(rows, dtype=torch.bool, device=device)  # whether the key is the request's seed
        self._random = torch.Generator().manual_seed(seed)

    def draw(self, rows: Tensor, seeds: Mapping[int, int]) -> None:
        """Give new keys to the requests in these rows [b] int64; request i of them has the seed seeds[i], if any."""
        self.table[rows] = request_keys(len(rows), seeds, generator=self._random).to(rows.device)
        seeded = torch.zeros(len(rows), dtype=torch.bool)
        seeded[list(seeds)] = True
        self.seeded[rows] = seeded.to(rows.device)

    def of(self, rows: Tensor) -> Tensor:
        """The keys of the requests in these rows, [b] int64."""
        return self.table[rows]


def without_sampled_children(sampling: SamplingParams, seeded: Tensor) -> SamplingParams:
    """The parameters to draft by, where the requests marked in seeded [b] bool get deterministic children only."""
    return sampling._replace(top_ks=sampling.top_ks.masked_fill(seeded, 1))


def draft_uniforms(rng_keys: Tensor, lengths: Tensor, shape: Shape) -> Tensor:
    """Numbers for the sampled children of P proposal rows, the root's first; [b, P, S] float64 in [0, 1).

    rng_keys [b] int64; lengths [b] int64: committed tokens, the root not counted.
    """
    rows = 1 + shape.draft_slots
    return uniforms(rng_keys, lengths, DRAFT, rows * NUM_SAMPLED).view(-1, rows, NUM_SAMPLED)


def verify_uniforms(rng_keys: Tensor, lengths: Tensor, max_accept_length: int) -> Tensor:
    """Numbers for the walk: S tests and a draw at each node of a path of E nodes; [b, E, S + 1] float64 in [0, 1).

    rng_keys [b] int64; lengths [b] int64: the position of the root.
    """
    positions = lengths[:, None] + torch.arange(max_accept_length, device=lengths.device)
    rng_keys = rng_keys.repeat_interleave(max_accept_length)
    return uniforms(rng_keys, positions.view(-1), VERIFY, NUM_SAMPLED + 1).view(-1, max_accept_length, NUM_SAMPLED + 1)


def synthetic_uniforms(rng_keys: Tensor, lengths: Tensor) -> Tensor:
    """Numbers for the length and the end of a synthetic path, [b, 2] float64; arguments as of `verify_uniforms`."""
    return uniforms(rng_keys, lengths, SYNTHETIC, UNIFORMS)


def draw_uniforms(rng_keys: Tensor, positions: Tensor) -> Tensor:
    """The numbers of `verify_uniforms` that draw the token after one position per request, [b, 1] float64."""
    return verify_uniforms(rng_keys, positions, 1)[:, 0, -1:].contiguous()
