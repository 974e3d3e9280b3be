"""Shapes of trees, and the defaults of policy.shapes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eagle_plugin.core.shape import MAX_WIDTH, PLAIN, Levels, Shape
from eagle_plugin.policy.shapes import CPU_SHAPE, shape_for


@pytest.mark.parametrize(
    ("shape", "longest", "slots", "reach"),
    [(PLAIN, 1, 0, 1), (Shape(2, 4, 8), 3, 4, 8), (Shape(4, 4, 3), 3, 12, 12), (Shape.chain(5), 6, 4, 6)],
)
def test_what_a_shape_needs(shape: Shape, longest: int, slots: int, reach: int) -> None:
    assert (shape.max_accept_length, shape.draft_slots, shape.reach) == (longest, slots, reach)


def test_at_most_so_many_drafted_nodes() -> None:
    caps = Shape(3, 4, 16)
    found = [caps.within_drafts(most) for most in (20, 15, 14, 3, 2, 1, 0)]
    assert found == [caps, caps, (3, 4, 15), (3, 3, 4), (2, 2, 3), (1, 1, 2), PLAIN]
    assert all(shape.steps < shape.width <= shape.candidates + 1 for shape in found[:-1])


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_shape_of_one_forward_of_the_head(rows: int) -> None:
    assert Levels.RECURRENT.one_forward(rows, 3) == (2, rows, rows + 1)
    assert Levels.PARALLEL.one_forward(rows, 3) == (rows + 1, 3, 4)
    for levels in (Levels.RECURRENT, Levels.PARALLEL):
        assert levels.forwards(levels.one_forward(rows, 3)) == (rows, 1)
    assert Levels.BLOCK.forwards(Levels.BLOCK.one_forward(rows, 3)) == (1, 1)


def test_a_shape_reads_as_its_flags() -> None:
    assert str(CPU_SHAPE) == "2/4/8" and str(Shape.chain(2)) == "2/1/3"


@pytest.mark.parametrize(
    ("draft_tokens", "shape"),
    [
        (1, (1, 1, 2)),
        (2, (2, 2, 3)),
        (5, (2, 4, 6)),
        (7, (2, 4, 8)),
        (8, (3, 4, 9)),
        (15, (3, 4, 16)),
        (16, (4, 4, 17)),
        (63, (4, 4, 64)),
    ],
)
def test_default_shapes(draft_tokens: int, shape: tuple[int, int, int]) -> None:
    assert shape_for(draft_tokens) == shape


@pytest.mark.parametrize(
    ("draft_tokens", "shape"),
    [
        (1, (1, 1, 2)),
        (2, (2, 2, 3)),
        (3, (3, 2, 4)),
        (5, (5, 2, 6)),
        (7, (7, 2, 8)),
        (15, (7, 4, 16)),
        (63, (7, 4, 64)),
    ],
)
def test_default_shapes_of_a_gpu_are_deeper(draft_tokens: int, shape: tuple[int, int, int]) -> None:
    assert shape_for(draft_tokens, on_gpu=True) == shape
    depth, topk, _ = shape
    assert shape_for(draft_tokens, depth=depth, on_gpu=True) == shape_for(draft_tokens, topk=topk, on_gpu=True) == shape
    assert shape_for(draft_tokens, levels=9, on_gpu=True) == shape_for(draft_tokens, levels=9)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_default_shapes_have_drafts_for_their_nodes(on_gpu: bool) -> None:
    for draft_tokens in range(1, MAX_WIDTH):
        shape = shape_for(draft_tokens, on_gpu=on_gpu)
        assert shape.draft_slots <= (24 if on_gpu else draft_tokens)
        assert shape.candidates + 1 >= shape.width or not on_gpu


def test_given_caps_are_kept() -> None:
    assert shape_for(8, depth=3, topk=2) == (3, 2, 9) and shape_for(8, topk=9) == (3, 9, 9)


def test_shapes_need_no_torch() -> None:
    """The benchmark and the hooks of the engines' launchers read them."""
    code = "import sys, eagle_plugin.policy.policy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
