"""Trees reduced to chains against a plain loop over children."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_plugin.core.tree import DraftTree, as_chains

prop = settings(derandomize=True, deadline=None, max_examples=80, database=None)


def tree_of(parents: list[list[int]]) -> DraftTree:
    """Trees [b, W] with these parents (-1: root, padding) and distinct tokens."""
    b, W = len(parents), len(parents[0])
    tokens = torch.arange(100, 100 + b * W).view(b, W)
    depths, ancestors = torch.zeros(b, W, dtype=torch.int32), torch.zeros(b, W, dtype=torch.int64)
    for i, row in enumerate(parents):
        for node, parent in enumerate(row):
            above = {0} if parent < 0 else {j for j in range(W) if int(ancestors[i, parent]) >> j & 1}
            ancestors[i, node] = word(above | {node})
            depths[i, node] = 0 if parent < 0 else depths[i, parent] + 1
    return DraftTree(tokens, torch.tensor(parents, dtype=torch.int32), depths, ancestors)


def word(nodes: set[int]) -> int:
    """The ancestor bitmask of a set of nodes, as a signed number."""
    bits = sum(1 << j for j in nodes)
    return bits - 2**64 if bits >= 2**63 else bits


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    b, W = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    return [[-1, *(draw(st.integers(-1, node - 1)) for node in range(1, W))] for _ in range(b)]


def reachable(parents: list[int]) -> list[int]:
    """Padding has no child: nodes below it become padding too."""
    kept = [parents[0]]
    for parent in parents[1:]:
        kept.append(parent if parent == 0 or (parent > 0 and kept[parent] >= 0) else -1)
    return kept


@prop
@given(trees(), st.data())
def test_the_chain_follows_first_children(parents: list[list[int]], data: st.DataObject) -> None:
    parents = [reachable(row) for row in parents]
    tree = tree_of(parents)
    b, W = tree.tokens.shape
    chosen = [data.draw(st.booleans()) for _ in range(b)]
    found = as_chains(tree, torch.tensor(chosen))
    for i in range(b):
        if not chosen[i]:
            assert all(torch.equal(new[i], old[i]) for new, old in zip(found, tree, strict=True))
            continue
        chain = [0]
        while children := [node for node in range(1, W) if parents[i][node] == chain[-1]]:
            chain.append(children[0])
        rest = W - len(chain)
        root = int(tree.tokens[i, 0])
        assert found.tokens[i].tolist() == [int(tree.tokens[i, node]) for node in chain] + [root] * rest
        assert found.parents[i].tolist() == [*range(-1, len(chain) - 1), *[-1] * rest]
        assert found.depths[i].tolist() == [*range(len(chain)), *[0] * rest]
        on_chain = [word(set(range(place + 1))) for place in range(len(chain))]
        assert found.ancestors[i].tolist() == on_chain + [word({0, place}) for place in range(len(chain), W)]


def test_the_longest_chain_fills_the_word() -> None:
    found = as_chains(tree_of([[*range(-1, 63)]]), torch.tensor([True]))
    assert found.ancestors[0, 63] == -1 and found.depths[0, 63] == 63


def test_dtypes_stay() -> None:
    tree = tree_of([[-1, 0, 0, 1]])
    assert [x.dtype for x in as_chains(tree, torch.tensor([True]))] == [x.dtype for x in tree]
