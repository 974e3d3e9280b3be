"""Levels, selection and links of the draft tree: native on the CPU and on CUDA, the torch oracle elsewhere.

The functions have the names, shapes and results of `core.tree` and `core.links`; TypeError and ValueError name a wrong
input. Values are checked on the CPU only: on CUDA that would wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core import links
from eagle_plugin.core import tree as oracle
from eagle_plugin.core.propose import MAX_TOP_M
from eagle_plugin.core.shape import MAX_WIDTH
from eagle_plugin.core.tree import CandidateTable, DraftTree, Frontier, new_table, unwritten_table
from eagle_plugin.kernels.checks import ANY, check
from eagle_plugin.kernels.loader import function

__all__ = [
    "CandidateTable",
    "DraftTree",
    "Frontier",
    "grow_level",
    "grow_levels",
    "new_table",
    "select_tree",
    "sibling_links",
    "unwritten_table",
]
__all__ += ["topk_log_softmax"]

_LOGITS = (torch.float32, torch.bfloat16, torch.float16)


def topk_log_softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return log p [R, k] float32 and index [R, k] int64 of the k best tokens; see `core.tree.topk_log_softmax`."""
    if logits.dtype not in _LOGITS:
        raise TypeError(f"logits is {logits.dtype}, wanted float32, bfloat16 or float16: convert it with .to()")
    if logits.dim() != 2 or not 1 <= k <= min(logits.shape[1], MAX_TOP_M):
        raise ValueError(f"k is {k} for logits of shape {list(logits.shape)}, wanted [R, V] and 1 <= k <= min(V, 128)")
    native = function("topk_log_softmax", logits.device.type)
    if native is None:
        return oracle.topk_log_softmax(logits, k)
    rows = logits.shape[0]
    logp = logits.new_empty(rows, k, dtype=torch.float32)
    index = logits.new_empty(rows, k, dtype=torch.int64)
    native(logits, logp, index)
    return logp, index


def grow_level(
    table: CandidateTable,
    offset: int,
    level: int,
    logp: Tensor,
    tokens: Tensor,
    previous: Frontier | None,
    beam: int,
    draws: Tensor | None = None,
) -> Frontier:
    """Write a level's candidates into the table and return the best `beam`; see `core.tree.grow_level`."""
    native = function("grow_level", logp.device.type)
    if native is None:
        _check_level(table, offset, level, logp, tokens, previous, beam, draws)
        return oracle.grow_level(table, offset, level, logp, tokens, previous, beam, draws)
    if logp.dim() != 3:
        raise ValueError(f"logp has shape {list(logp.shape)}, wanted [b, Fp, k]: pass a tensor of that shape")
    b, rows, k = logp.shape
    keep = max(min(beam, rows * k), 0)
    frontier = Frontier(
        logp.new_empty(b, keep, dtype=torch.int32),
        logp.new_empty(b, keep),
        logp.new_empty(b, keep, dtype=torch.int64),
        logp.new_empty(b, keep, dtype=torch.int64),
        logp.new_empty(b, keep, dtype=torch.int64),
    )
    before = (None, None, None) if previous is None else (previous.candidates, previous.scores, previous.ancestors)
    native(*table, offset, level, logp, tokens, draws, *before, beam, *frontier)
    return frontier


def grow_levels(
    table: CandidateTable, steps: int, beam: int, logp: Tensor, tokens: Tensor, draws: Tensor | None = None
) -> None:
    """Write all levels of trees whose children do not depend on the path above; see `core.tree.grow_levels`."""
    native = function("grow_levels", logp.device.type)
    if native is None:
        _check_levels(table, steps, beam, logp, tokens, draws)
        oracle.grow_levels(table, steps, beam, logp, tokens, draws)
        return
    native(*table, steps, beam, logp, tokens, draws)


def select_tree(table: CandidateTable, root_tokens: Tensor, width: int) -> DraftTree:
    """Return the best width - 1 candidates and the root as a DraftTree; see `core.tree.select_tree`.

    A table in which a candidate's parent scores lower or comes after it gives ValueError on the CPU, and a tree of the
    root alone on CUDA.
    """
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"width is {width}, wanted 1 to 64: ancestors are one 64-bit bitmask per node")
    native = function("select_tree", root_tokens.device.type)
    if native is None:
        _check_table(table, root_tokens.shape[0])
        check(root_tokens, "root_tokens", torch.int64, (ANY,))
        return oracle.select_tree(table, root_tokens, width)
    b = root_tokens.shape[0]
    tree = DraftTree(
        root_tokens.new_empty(b, width),
        root_tokens.new_empty(b, width, dtype=torch.int32),
        root_tokens.new_empty(b, width, dtype=torch.int32),
        root_tokens.new_empty(b, width),
        root_tokens.new_empty(b, width, dtype=torch.int32),
    )
    native(*table, root_tokens, *tree)
    return tree


def sibling_links(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first child and the next sibling of every node, [b, W] int64 each; see `core.links.sibling_links`."""
    native = function("sibling_links", parents.device.type)
    if native is None:
        check(parents, "parents", torch.int32, (ANY, ANY))
        return links.sibling_links(parents)
    first_child, next_sibling = (torch.empty_like(parents, dtype=torch.int64) for _ in range(2))
    native(parents, first_child, next_sibling)
    return first_child, next_sibling


# The torch path's copy of the argument checks in csrc/bindings/tree.h; the tests want the same sentences from both.


def _check_table(table: CandidateTable, b: int) -> None:
    check(table.scores, "table.scores", torch.float32, (b, ANY))
    check(table.tokens, "table.tokens", torch.int64, tuple(table.scores.shape))
    check(table.parents, "table.parents", torch.int32, tuple(table.scores.shape))
    check(table.draws, "table.draws", torch.int32, tuple(table.scores.shape))


def _check_children(table: CandidateTable, logp: Tensor, tokens: Tensor, draws: Tensor | None) -> torch.Size:
    """Returns the shape [b, rows, k] of the children."""
    check(logp, "logp", torch.float32, (ANY, ANY, ANY))
    check(tokens, "tokens", torch.int64, tuple(logp.shape))
    if draws is not None:
        check(draws, "draws", torch.int32, tuple(logp.shape))
    _check_table(table, len(logp))
    return logp.shape


def _check_level(
    table: CandidateTable,
    offset: int,
    level: int,
    logp: Tensor,
    tokens: Tensor,
    previous: Frontier | None,
    beam: int,
    draws: Tensor | None,
) -> None:
    b, rows, k = _check_children(table, logp, tokens, draws)
    if previous is not None:
        check(previous.candidates, "previous.candidates", torch.int32, (b, rows))
        check(previous.scores, "previous.scores", torch.float32, (b, rows))
        check(previous.ancestors, "previous.ancestors", torch.int64, (b, rows))
    elif rows != 1:
        raise ValueError(
            f"logp has {rows} rows per request, wanted 1 without a previous frontier: "
            "only the root has children at level 1"
        )
    capacity, need = table.scores.shape[1], offset + rows * k
    if offset < 0 or need > capacity:
        raise ValueError(
            f"table holds {capacity} candidates, wanted at least {need} (offset {offset}): "
            "make it larger with new_table"
        )
    keep = min(beam, rows * k)
    if level < 1 or keep < 0 or (level - 1) * beam + keep > MAX_WIDTH:
        raise ValueError(
            f"level {level} with beam {beam} needs draft slots up to {(level - 1) * beam + keep}, wanted at most 64: "
            "lower the depth or the beam"
        )


def _check_levels(
    table: CandidateTable, steps: int, beam: int, logp: Tensor, tokens: Tensor, draws: Tensor | None
) -> None:
    b, rows, k = _check_children(table, logp, tokens, draws)
    slots = (steps - 1) * beam
    if steps < 1 or beam < 1 or slots > MAX_WIDTH:
        raise ValueError(
            f"{steps} levels with beam {beam} need {slots} draft slots, wanted at most 64, and at least 1 level and 1 "
            "node: lower the depth or the beam"
        )
    if rows != 1 + slots or k < beam:
        raise ValueError(
            f"logp has {rows} rows of {k} children per request, wanted {1 + slots} of at least {beam}: one for the "
            "root, then beam for each level"
        )
    capacity = table.scores.shape[1]
    if rows * k > capacity:
        raise ValueError(
            f"table holds {capacity} candidates, wanted at least {rows * k}: make it larger with new_table"
        )
