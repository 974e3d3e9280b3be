"""The verification oracles against plain Python."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_plugin.core.verify import Accepted, compact_rows, verify_greedy

prop = settings(derandomize=True, deadline=None, max_examples=150, database=None)


@st.composite
def walks(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int]:
    width = draw(st.integers(1, 64))
    # a random tree with some padding (parent -1) and few distinct tokens, so that deep paths are accepted
    parents = [-1, *(draw(st.integers(-1, i - 1)) for i in range(1, width))]
    words = draw(st.integers(1, 3))
    tokens = draw(st.lists(st.integers(0, words - 1), min_size=width, max_size=width))
    targets = draw(st.lists(st.integers(0, words - 1), min_size=width, max_size=width))
    return parents, tokens, targets, draw(st.integers(1, 9))


def walk(parents: list[int], tokens: list[int], targets: list[int], stride: int) -> list[int]:
    path = [0]
    while len(path) < stride:
        children = [c for c, p in enumerate(parents) if p == path[-1] and tokens[c] == targets[path[-1]]]
        if not children:
            break
        path.append(children[0])
    return path


def run(parents: list[int], tokens: list[int], targets: list[int], stride: int) -> Accepted:
    return verify_greedy(
        torch.tensor([tokens]), torch.tensor([parents], dtype=torch.int32), torch.tensor([targets]), stride
    )


@prop
@given(walks())
def test_walk(case: tuple[list[int], list[int], list[int], int]) -> None:
    parents, tokens, targets, stride = case
    path = walk(*case)
    accepted = run(*case)
    assert accepted.index[0].tolist() == path + [-1] * (stride - len(path))
    assert int(accepted.lengths[0]) == len(path)
    said = [tokens[n] for n in path[1:]] + [targets[path[-1]]]
    assert accepted.tokens[0].tolist() == said + [0] * (stride - len(said))


def test_the_walk_leaves_the_tree_when_the_target_disagrees() -> None:
    parents, tokens, targets = [-1, 0, 1, 2], [0, 5, 6, 7], [5, 6, 7, 8]
    assert run(parents, tokens, targets, 8).tokens[0, :4].tolist() == [5, 6, 7, 8]
    targets[1] = 9  # one different choice: the rest of the path is lost, the bonus token is the target's
    assert run(parents, tokens, targets, 8).tokens[0].tolist() == [5, 9, 0, 0, 0, 0, 0, 0]


@prop
@given(st.integers(0, 2**31), st.integers(0, 3), st.integers(1, 10), st.integers(1, 8))
def test_compact_rows(seed: int, b: int, width: int, stride: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    cache = torch.randn(b * width + 5, 2, 3, generator=gen)
    window = torch.randperm(b * width + 5, generator=gen)[: b * width].view(b, width)
    lengths = torch.randint(0, min(width, stride) + 1, (b,), generator=gen).int()
    index = torch.full((b, stride), -1, dtype=torch.int32)
    for i in range(b):
        n = int(lengths[i])
        index[i, :n] = torch.randperm(width, generator=gen)[:n]  # any order: sources are read before rows are written
    wanted = cache.clone()
    for i in range(b):
        for j in range(int(lengths[i])):
            wanted[window[i, j]] = cache[window[i, int(index[i, j])]]
    compact_rows(cache, window, index, lengths)
    assert torch.equal(cache, wanted)
