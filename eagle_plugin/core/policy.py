"""Every default of a decode round: the shape of the trees, and the slot weights of sampled children.

The shapes are those that gave the most tokens per second on two CPU cores (docs/performance.md).
"""

from __future__ import annotations

from eagle_plugin.core.shape import Shape

# Children of a node at temperature > 0 that are drawn instead of chosen. A slot competes for its place in the tree with
# this part of the probability mass that its token is drawn from. Chosen by accept length with a first head of a small
# model: at 1 the slots crowd out tokens that are accepted more often (benchmarks/acceptance.py --slot-weights).
SLOT_WEIGHTS = (0.4, 0.12)
NUM_SAMPLED = len(SLOT_WEIGHTS)  # S: sampled children per node

MAX_TOP_M = 128  # M: most likely tokens of a row that sampled children are drawn from

CPU_SHAPE = Shape(steps=2, topk=4, width=8)  # a deeper tree costs more draft steps than it gains
MAX_DEFAULT_TOPK = 4


def shape_for(draft_tokens: int, depth: int | None = None, topk: int | None = None) -> Shape:
    """Return the shape of trees with `draft_tokens` drafted tokens; what is None is chosen.

    The levels after the first write draft keys into the slots that an engine reserves, one per drafted token: a chosen
    topk never needs more of them. A given one may; the caller checks `Shape.draft_slots`.
    """
    if depth is None:
        depth = 1 if draft_tokens == 1 else 2 if draft_tokens <= 7 else 3 if draft_tokens <= 15 else 4
    if topk is None:
        topk = max(1, min(MAX_DEFAULT_TOPK, draft_tokens // max(depth - 1, 1)))
    return Shape(depth, topk, draft_tokens + 1)
