"""Random inputs shared by the kernel tests."""

from __future__ import annotations

import os

import torch
from hypothesis import settings
from torch import Tensor

from eagle_plugin.core.sampling import SamplingParams

# The matrix has more; the sanitizer run repeats these tests on a slow library, with fewer examples
EXAMPLES = int(os.environ.get("EAGLE_TEST_EXAMPLES", "30"))
prop = settings(derandomize=True, deadline=None, max_examples=EXAMPLES, database=None)


def random_parents(b: int, width: int, gen: torch.Generator) -> Tensor:
    """Return parents [b, width] int32 of random trees, where about one node in eight is padding."""
    parents = torch.full((b, width), -1, dtype=torch.int32)
    for i in range(b):
        for node in range(1, width):
            if torch.rand((), generator=gen) > 0.125:
                parents[i, node] = torch.randint(0, node, (), generator=gen)
    return parents


def ancestor_bitmasks(parents: Tensor) -> Tensor:
    """Return the ancestor bitmasks [b, width] int64 of trees."""
    b, width = parents.shape
    ancestors = torch.zeros(b, width, dtype=torch.int64)
    one = torch.ones((), dtype=torch.int64)
    for i in range(b):
        for node in range(width):
            parent = int(parents[i, node])
            ancestors[i, node] = (one << node) | (ancestors[i, parent] if parent >= 0 else 1)
    return ancestors


def random_params(rows: int, vocab: int, gen: torch.Generator) -> SamplingParams:
    """Settings of which some are off and some rows greedy."""

    def some(values: Tensor, off: float) -> Tensor:
        return torch.where(torch.rand(rows, generator=gen) < 0.5, values, off)

    top_ks = some(torch.randint(1, vocab + 2, (rows,), generator=gen), 2**30).int()
    return SamplingParams.of(rows)._replace(
        temperatures=0.2 + 1.8 * torch.rand(rows, generator=gen),
        top_ks=top_ks,
        top_ps=some(torch.rand(rows, generator=gen), 1.0),
        min_ps=some(torch.rand(rows, generator=gen) * 0.3, 0.0),
    )
