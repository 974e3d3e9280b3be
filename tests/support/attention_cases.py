"""Requests in a paged cache, for the tests of attention; slots that no row may see contain NaN."""

from __future__ import annotations

from typing import Any

import torch
from float8_bits import random_bits
from kernel_cases import ancestor_bitmasks, random_parents
from torch import Tensor

from eagle_plugin.kernels import attention_torch

# seed, key heads, query heads of each, head_dim of keys and values, dtype, page size
Shape = tuple[int, int, int, tuple[int, int], torch.dtype, int]


class Case:
    """A paged cache with requests of given numbers of keys, in randomly scattered pages of `page` slots."""

    def __init__(
        self,
        seed: int,
        lens: list[int],
        kv_heads: int,
        group: int,
        dims: tuple[int, int],
        dtype: torch.dtype,
        page: int,
        stored: torch.dtype | None = None,
        latent: bool = False,
    ):
        """stored: of the cache, where it is one of 8-bit floats. latent: values are the first numbers of the keys."""
        self.gen = gen = torch.Generator().manual_seed(seed)
        self.dtype, self.heads = dtype, kv_heads * group
        b, longest = len(lens), max(lens, default=0)
        pages = sum(-(-n // page) for n in lens) + 4
        slots = pages * page
        self.stored = stored
        self.k, self.v = (torch.full((slots, kv_heads, d), torch.nan, dtype=stored or dtype) for d in dims)
        if latent:
            self.v = self.k[..., : dims[1]]
        self.table = torch.full((b + 2, longest + 1), 2**31 - 1, dtype=torch.int32)  # past the end: invalid slots
        self.rows = torch.randperm(b + 2, generator=gen)[:b]
        free = (torch.randperm(pages, generator=gen)[:, None] * page + torch.arange(page)).flatten()
        for row, n in zip(self.rows.tolist(), lens, strict=True):
            self.table[row, :n], free = free[:n].int(), free[-(-n // page) * page :]
        self.sinks = torch.randn(self.heads, generator=gen)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.gen).to(self.dtype)

    def write(self, request: int, seen: Tensor) -> None:
        """Give the keys that some row sees finite values; the others stay NaN and their slots invalid."""
        positions = seen.any(dim=0).nonzero()[:, 0]
        slots = self.table[self.rows[request], positions].long()
        for cache in (self.k, self.v):
            shape = (len(slots), *cache.shape[1:])
            cache[slots] = random_bits(self.gen, *shape, dtype=self.stored) if self.stored else self.randn(*shape)
        hidden = (~seen.any(dim=0)).nonzero()[:, 0]
        self.table[self.rows[request], hidden] = -5


def oracle(case: Case, q: Tensor, visible: list[Tensor], starts: list[int], out: Tensor, **options: Any) -> Tensor:
    for i, (seen, start) in enumerate(zip(visible, starts, strict=True)):
        slots = case.table[case.rows[i], : seen.shape[1]].long().clamp(min=0)
        rows = slice(start, start + seen.shape[0])
        out[rows] = attention_torch.attend(q[rows], case.k[slots], case.v[slots], seen, **options)
    return out


def tree_case(
    shape: Shape,
    prefixes: list[int],
    R: int,
    extra: int,
    window: int,
    chunk: int = 0,
    stored: torch.dtype | None = None,
    latent: bool = False,
) -> tuple[Case, Tensor, int, list[Tensor]]:
    """A cache and R nodes per request of random trees of R + extra: case, ancestor bitmasks, tail, visible keys."""
    seed, *rest = shape
    tail = min(R + extra, 64)
    case = Case(seed, [p + tail for p in prefixes], *rest, stored=stored, latent=latent)
    ancestors = ancestor_bitmasks(random_parents(len(prefixes), min(tail, 64), case.gen))
    chosen = torch.randperm(tail, generator=case.gen)[:R] if prefixes else slice(R)
    ancestors = ancestors[:, chosen].contiguous()
    visible = [attention_torch.tree_visible(ancestors[i], p, tail, window, chunk) for i, p in enumerate(prefixes)]
    for i, seen in enumerate(visible):
        case.write(i, seen)
    return case, ancestors, tail, visible
