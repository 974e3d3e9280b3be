"""Lists the shapes that rounds may get: the defaults, and those within caps that a policy chooses from.

The defaults of CPUs are those that gave the most tokens per second on two cores (docs/performance.md). On GPUs a level
costs less than the tokens that it yields: there they are deeper, by the simulated rates of benchmarks/simulate.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from eagle_plugin.core.shape import MAX_WIDTH, PLAIN, Levels, Shape

CPU_SHAPE = Shape(steps=2, topk=4, width=8)  # a deeper tree costs more draft steps than it gains
GPU_SHAPE = Shape(steps=7, topk=2, width=8)  # what `shape_for` gives for 7 drafted tokens on a GPU
CPU_DRAFTS = 5  # tokens per round in vLLM, which has no default number: 5 were the fastest (docs/vllm.md)
GPU_DEPTH = 7  # levels: with fewer, a chain of as many drafted tokens is faster where nearly all are accepted
MAX_DEFAULT_TOPK = 4
PARALLEL_LEVELS = 7  # of a head that drafts all levels in one forward, where nothing says how many it was trained for


def shape_for(
    draft_tokens: int,
    depth: int | None = None,
    topk: int | None = None,
    levels: int | None = None,
    on_gpu: bool = False,
) -> Shape:
    """Return the shape of trees with `draft_tokens` drafted tokens; what is None is chosen.

    levels: of a head that drafts all levels in one forward, how many it drafts well; its trees are as deep, because
    depth costs little. on_gpu: they are as deep as the longest chains that pay, and the policy has flatter ones too.
    """
    if levels is not None:
        depth = depth or min(draft_tokens, levels, MAX_WIDTH // MAX_DEFAULT_TOPK)
        topk = topk or max(1, min(MAX_DEFAULT_TOPK, draft_tokens, MAX_WIDTH // max(depth - 1, 1)))
    if depth is None and on_gpu:
        depth = min(draft_tokens, GPU_DEPTH)
    elif depth is None:
        depth = 1 if draft_tokens == 1 else 2 if draft_tokens <= 7 else 3 if draft_tokens <= 15 else 4
    if topk is None:
        topk = max(2, draft_tokens // 3) if on_gpu else draft_tokens // max(depth - 1, 1)
        topk = max(1, min(topk, MAX_DEFAULT_TOPK, draft_tokens, MAX_WIDTH // max(depth - 1, 1)))
    return Shape(depth, topk, draft_tokens + 1)


def _flat_depth(draft_tokens: int) -> int:
    """Levels of a tree on a GPU whose branches matter: 3 for 3 drafted tokens, 4 for 7, 5 for 15, ... 7 for 63."""
    return min(draft_tokens, (draft_tokens + 1).bit_length())


# Widths that the policy chooses from: each is about half as much again as the one before.
WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
GRAPH_WIDTHS = (2, 3, 4, 8, 16)  # the same, where every shape needs CUDA graphs
DEEP_WIDTH = 8  # of these


def shapes_within(caps: Shape) -> list[Shape]:
    """The shapes that a policy may choose under these caps, plain decoding first; chains and trees of each depth."""
    shapes = [PLAIN]
    for steps in range(1, caps.steps + 1):
        widths = {width for width in (*WIDTHS, steps + 1) if width <= caps.width}
        for width in sorted(widths | {caps.width}):
            topk = min(caps.topk, max(width - steps, 1))
            candidates = topk + (steps - 1) * topk * topk
            if steps < width <= candidates + 1:
                shapes.append(Shape(steps, topk, width))
    return shapes if caps in shapes else [*shapes, caps]


def deepest_of(shapes: Collection[Shape]) -> list[Shape]:
    """Of the deepest shapes those with the most children per node, of any width."""
    deepest = max(shapes)
    return [shape for shape in shapes if shape[:2] == deepest[:2]]


def captured_shapes(caps: Shape, levels: Levels = Levels.RECURRENT) -> list[Shape]:
    """The few of `shapes_within` that get CUDA graphs: plain decoding, the caps, some between.

    Of `DEEP_WIDTH` nodes and of the caps' width two kinds: one whose branches matter, and one as deep as the caps, for
    targets that accept nearly all. levels: how the head drafts them; where depth is free, no tree need be shallow.
    """
    shapes = [PLAIN]
    for width in (*(width for width in GRAPH_WIDTHS if width < caps.width), caps.width):
        deep = min(caps.steps, width - 1)
        if levels.depth_is_free:
            topk = min(caps.topk, width - min(caps.steps, math.ceil(math.log2(width))))
            shapes.append(Shape(deep, topk, width))
        elif caps.topk == 1:
            if width <= caps.steps:
                shapes.append(Shape.chain(deep))
        else:
            flat = min(deep, _flat_depth(width - 1))
            both = flat + 1 < deep and width in (DEEP_WIDTH, caps.width)
            for steps in (flat, deep) if both else (flat,):
                shapes.append(Shape(steps, min(caps.topk, max(width - steps, 2), width - 1), width))
    return [*(shape for shape in shapes if shape.width < caps.width or shape.steps < caps.steps), caps]
