"""Padding, taking, cutting and joining of trees and proposals, against plain loops over requests and nodes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_plugin.core.tree import DraftTree, new_table, select_tree

prop = settings(derandomize=True, deadline=None, max_examples=60, database=None)
Node = tuple[int, ...]


def random_trees(b: int, width: int, seed: int) -> DraftTree:
    gen = torch.Generator().manual_seed(seed)
    parents = torch.full((b, width), -1, dtype=torch.int32)
    depths = torch.zeros(b, width, dtype=torch.int32)
    ancestors = torch.ones(b, width, dtype=torch.int64)
    for i in range(b):
        for node in range(1, width):
            parent = int(torch.randint(0, node, (), generator=gen))
            parents[i, node], depths[i, node] = parent, depths[i, parent] + 1
            ancestors[i, node] = ancestors[i, parent] | 1 << node
    tokens = torch.randint(0, 1000, (b, width), generator=gen)
    return DraftTree(tokens, parents, depths, ancestors)


def nodes(tree: DraftTree, i: int) -> list[Node]:
    return list(zip(*(values[i].tolist() for values in tree), strict=True))


def padding(root: int, node: int) -> Node:
    return (root, -1, 0, 1 << node | 1)


sizes = st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(0, 2**31))


@prop
@given(sizes)
def test_padding_is_what_selection_leaves_where_nothing_was_drafted(case: tuple[int, int, int]) -> None:
    b, width, seed = case
    roots = torch.arange(b) + seed % 100
    found, selected = DraftTree.padding(roots, width), select_tree(new_table(b, 0), roots, width)
    for i in range(b):
        assert nodes(found, i) == [padding(int(roots[i]), node) for node in range(width)] == nodes(selected, i)
    assert all(x.dtype == y.dtype for x, y in zip(found, selected, strict=True))


@prop
@given(sizes, st.data())
def test_truncated_trees(case: tuple[int, int, int], data: st.DataObject) -> None:
    b, width, seed = case
    tree = random_trees(b, width, seed)
    kept = data.draw(st.lists(st.integers(1, width), min_size=b, max_size=b))
    found = tree.truncate(torch.tensor(kept))
    for i, n in enumerate(kept):
        root = int(tree.tokens[i, 0])
        assert nodes(found, i) == nodes(tree, i)[:n] + [padding(root, node) for node in range(n, width)]


@prop
@given(sizes, st.integers(1, 12))
def test_resized_trees(case: tuple[int, int, int], width: int) -> None:
    tree = random_trees(*case)
    found = tree.resize(width)
    for i in range(case[0]):
        root = int(tree.tokens[i, 0])
        assert nodes(found, i) == (nodes(tree, i) + [padding(root, node) for node in range(case[1], width)])[:width]
    assert all(values.is_contiguous() for values in found)


@prop
@given(st.lists(sizes, min_size=1, max_size=3), st.data())
def test_trees_of_several_batches(cases: list[tuple[int, int, int]], data: st.DataObject) -> None:
    parts = [random_trees(*case) for case in cases]
    width = max(case[1] for case in cases)
    whole = DraftTree.concatenate(parts)
    wanted = [nodes(part.resize(width), i) for part in parts for i in range(len(part.tokens))]
    assert [nodes(whole, i) for i in range(len(whole.tokens))] == wanted
    order = data.draw(st.permutations(range(len(wanted))))
    taken = whole.take(torch.tensor(order))
    assert [nodes(taken, i) for i in range(len(order))] == [wanted[i] for i in order]
