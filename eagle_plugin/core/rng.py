"""Random numbers by counter: Philox-4x32-10 (Salmon et al., SC 2011, section 3.3).

A number depends on nothing but (key, counter, stream, place). So a seeded request draws the same numbers whatever else
is in its batch, and a server keeps no generator state.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def uniforms(rng_keys: Tensor, counters: Tensor, stream: int, n: int) -> Tensor:
    """Return n numbers per row, uniform in [0, 1) with 53 random bits.

    rng_keys [b] int64 (64 random bits, or a seed) and counters [b] int64 (0 or more) -> [b, n] float64. Rows with equal
    key and counter are equal; another stream (0 .. 2^32 - 1) is another, independent sequence.
    """
    blocks = torch.arange((n + 1) // 2, device=rng_keys.device).expand(len(rng_keys), -1)  # a block makes two numbers
    words = random_bits(rng_keys, counters, stream, blocks)
    pairs = [((words[i] >> 5) * 2**26 + (words[i + 1] >> 6)).double() * 2.0**-53 for i in (0, 2)]
    return torch.stack(pairs, dim=-1).reshape(len(rng_keys), -1)[:, :n].contiguous()


def random_bits(rng_keys: Tensor, counters: Tensor, stream: int, blocks: Tensor) -> list[Tensor]:
    """The four words of each block [b, n] int64 of a row, each [b, n] int64 with 32 random bits; the rest as above."""
    return _philox(
        [blocks, torch.full_like(blocks, stream), (counters & _LOW)[:, None], (counters >> 32 & _LOW)[:, None]],
        [(rng_keys & _LOW)[:, None], (rng_keys >> 32 & _LOW)[:, None]],
    )


def _philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Ten rounds on 32-bit words held in int64."""
    shape = torch.broadcast_shapes(*(word.shape for word in (*counter, *key)))
    c = [word.expand(shape) for word in counter]
    for _ in range(ROUNDS):
        high0, low0 = _product(c[0], _MULTIPLIERS[0])
        high1, low1 = _product(c[2], _MULTIPLIERS[1])
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [(word + step) & _LOW for word, step in zip(key, _KEY_STEPS, strict=True)]
    return c


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The high and low halves of a 64-bit product; int64 wraps, its bits are those of uint64."""
    product = word * multiplier
    return product >> 32 & _LOW, product & _LOW
