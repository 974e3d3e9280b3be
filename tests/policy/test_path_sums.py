"""Sums of path scores against plain Python over a random candidate table, and against `core.tree.select_tree`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.tree import CandidateTable, Frontier, grow_level, new_table, select_tree
from eagle_plugin.policy.path_sums import PathSums
from eagle_plugin.policy.shapes import shapes_within

DRAFTED = [Shape(1, 1, 2), Shape.chain(4), Shape(2, 4, 8), Shape(3, 4, 16), Shape(3, 3, 6), Shape(4, 2, 64)]


def draft_table(shape: Shape, b: int, seed: int) -> tuple[CandidateTable, list[list[list[int]]]]:
    """A random table of b requests, and the candidates of each level's frontier by request, best first."""
    gen, children = torch.Generator().manual_seed(seed), shape.topk
    table = new_table(b, (1 + shape.draft_slots) * children)
    previous: Frontier | None = None
    frontiers = []
    offset, rows = 0, 1
    for level in range(1, shape.steps + 1):
        logp = torch.randn(b, rows, children + 3, generator=gen).mul(2).log_softmax(-1)[..., :children]
        logp = logp.sort(dim=-1, descending=True).values
        logp[torch.rand(b, rows, children, generator=gen) < 0.05] = -math.inf  # a grammar, or a broken head
        tokens = torch.randint(1000, (b, rows, children), generator=gen)
        previous = grow_level(table, offset, level, logp, tokens, previous, shape.topk if level < shape.steps else 0)
        frontiers.append(previous.candidates.tolist())
        offset, rows = offset + rows * children, shape.topk
    return table, frontiers


def slow_sums(drafted: Shape, wanted: Shape, table: CandidateTable, frontiers, request: int):
    """The sums [D] of one request by the rule of `PathSums`, candidate by candidate."""
    scores = table.scores[request].tolist()
    place = {}  # candidate -> its place in the frontier of its level
    for frontier in frontiers:
        place |= {candidate: i for i, candidate in enumerate(frontier[request])}
    possible = []
    depth_of = {}
    for candidate in range(len(scores)):
        parent = int(table.parents[request, candidate])
        depth_of[candidate] = 1 if parent < 0 else depth_of[parent] + 1
        is_first_child = candidate % drafted.topk < wanted.topk
        is_first_node = parent < 0 or place[parent] < wanted.topk
        if depth_of[candidate] <= wanted.steps and is_first_child and is_first_node:
            possible.append(candidate)
    best = sorted(possible, key=lambda candidate: (-scores[candidate], candidate))[: wanted.width - 1]
    return [
        sum(math.exp(scores[candidate]) for candidate in best if depth_of[candidate] == depth)
        for depth in range(1, drafted.steps + 1)
    ]


@pytest.mark.parametrize("drafted", DRAFTED, ids=str)
def test_sums_of_every_covered_shape(drafted: Shape) -> None:
    b = 3
    shapes = [*shapes_within(Shape(4, 4, 16)), drafted]
    table, frontiers = draft_table(drafted, b, seed=drafted.width)
    sums = PathSums(drafted, shapes, "cpu")
    assert set(sums.shapes) == {x for x in shapes if x.steps <= drafted.steps and x.topk <= drafted.topk}
    assert PLAIN in sums.shapes
    found = sums(table.scores)
    assert found.shape == (len(sums.shapes), b, drafted.steps)
    found = found.mean(dim=1)
    for shape, values in zip(sums.shapes, found.tolist(), strict=True):
        slow = [slow_sums(drafted, shape, table, frontiers, i) for i in range(b)]
        assert values == pytest.approx([sum(column) / b for column in zip(*slow, strict=True)], rel=1e-5, abs=1e-7)


def sums_of_selection(table: CandidateTable, width: int, steps: int) -> Tensor:
    """The sums [D] of the trees that `select_tree` picks: every candidate's token is its place in the table."""
    b, C = table.scores.shape
    places = torch.arange(C).expand(b, C).contiguous()
    tree = select_tree(table._replace(tokens=places), torch.zeros(b, dtype=torch.int64), width)
    scores = table.scores.gather(1, tree.tokens).exp()
    is_at = (tree.depths[:, :, None] == torch.arange(1, steps + 1)) & (tree.parents >= 0)[:, :, None]
    return (scores[:, :, None] * is_at).sum(1).mean(0)


@pytest.mark.parametrize("drafted", DRAFTED, ids=str)
def test_the_drafted_shape_has_the_sums_of_the_selected_tree(drafted: Shape) -> None:
    table, _ = draft_table(drafted, 3, seed=7)
    sums = PathSums(drafted, [drafted], "cpu")
    found = sums(table.scores)[0].mean(dim=0)
    torch.testing.assert_close(found, sums_of_selection(table, drafted.width, drafted.steps))
    if 2 < drafted.width <= table.scores.shape[1]:  # the control: a tree with one node less has other sums
        assert (found - sums_of_selection(table, drafted.width - 1, drafted.steps)).abs().max() > 1e-6
    assert sums.by_shape(sums(table.scores)) == {drafted: pytest.approx(found.tolist())}


def test_values_of_a_shape_end_with_its_last_level() -> None:
    drafted = Shape(3, 2, 8)
    shapes = shapes_within(drafted)
    table, _ = draft_table(drafted, 2, seed=1)
    sums = PathSums(drafted, shapes, "cpu")
    by_shape = sums.by_shape(sums(table.scores))
    assert {shape: len(values) for shape, values in by_shape.items()} == {shape: shape.steps for shape in shapes}
    assert all(values == sorted(values, reverse=True) for values in by_shape.values())


def test_a_head_without_candidates_promises_nothing() -> None:
    drafted = Shape(3, 2, 8)
    scores = torch.full((2, (1 + drafted.draft_slots) * 2), -math.inf)
    assert PathSums(drafted, shapes_within(drafted), "cpu")(scores).count_nonzero() == 0


def test_steps_of_a_looked_up_path_belong_to_every_shape_that_is_deep_enough() -> None:
    drafted, shapes = Shape(2, 2, 4), [Shape(1, 1, 3), Shape(2, 2, 4)]
    head, looked_up = [0.5, 0.3, 0.2, 0.1, 0.1, 0.05], [0.4, 0.35]
    assert len(head) == drafted.candidates
    scores = torch.tensor([head + looked_up]).log()
    sums = PathSums(drafted, shapes, "cpu", scores.shape[1])(scores)
    torch.testing.assert_close(sums[:, 0], torch.tensor([[0.9, 0.0], [0.9, 0.35]]))
    without = PathSums(drafted, shapes, "cpu")(scores[:, : drafted.candidates])
    torch.testing.assert_close(without[:, 0], torch.tensor([[0.5, 0.0], [0.8, 0.2]]))
