"""The kernel for penalties of vLLM's V2 runner with docs/patches applied, in Triton's interpreter, over trees.

test_upstream_patch.py runs it: patched_penalties.py FILE, with the patched penalties.py.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
import vllm.triton_utils
from torch import Tensor

VOCABULARY = 64
# Three requests: a tree of five nodes, one token, a chain of three; each row's parent.
PARENTS = [-1, 0, 0, 1, 2, -1, -1, 6, 7]
TOKENS = [9, 3, 4, 3, 5, 7, 8, 8, 2]
REQUESTS = [0, 0, 0, 0, 0, 1, 2, 2, 2]


def penalties_of(file: Path) -> ModuleType:
    import triton
    import triton.language

    vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language
    spec = importlib.util.spec_from_file_location("patched_penalties_module", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def path_counts(row: int, parents: list[int]) -> Tensor:
    """How often each token is on the path to this row, without the root: it is committed, and counted already."""
    counts = torch.zeros(VOCABULARY)
    while parents[row] >= 0:
        counts[TOKENS[row]] += 1
        row = parents[row]
    return counts


def main() -> None:
    penalties = penalties_of(Path(sys.argv[1]))
    gen = torch.Generator().manual_seed(1)
    plain = torch.randn(len(TOKENS), VOCABULARY, generator=gen)
    committed = torch.randint(0, 2, (3, VOCABULARY), generator=gen, dtype=torch.int32)
    frequency, presence = torch.tensor([0.5, 0.25, 1.0]), torch.tensor([0.0, 2.0, 0.125])
    places = torch.tensor([0, 1, 2, 3, 4, 0, 0, 1, 2], dtype=torch.int32)

    def penalized(parents: list[int] | None) -> Tensor:
        logits = plain.clone()
        penalties.apply_penalties(
            logits,
            torch.tensor(REQUESTS, dtype=torch.int32),
            torch.tensor(TOKENS, dtype=torch.int32),
            places,
            None if parents is None else torch.tensor(parents, dtype=torch.int32),
            torch.ones(3),
            frequency,
            presence,
            torch.zeros(3, VOCABULARY // 32, dtype=torch.int32),
            committed,
        )
        return logits

    def wanted(parents: list[int]) -> Tensor:
        counts = torch.stack([path_counts(row, parents) for row in range(len(TOKENS))]) + committed[REQUESTS]
        return plain - frequency[REQUESTS, None] * counts - presence[REQUESTS, None] * (counts > 0)

    chain = [-1, 0, 1, 2, 3, -1, -1, 6, 7]
    torch.testing.assert_close(penalized(PARENTS), wanted(PARENTS))
    torch.testing.assert_close(penalized(chain), wanted(chain))
    torch.testing.assert_close(penalized(None), wanted(chain))  # as without the patch
    assert not torch.allclose(penalized(None), wanted(PARENTS))  # control: what a tree would be charged for siblings
    print("equal")


if __name__ == "__main__":
    main()
