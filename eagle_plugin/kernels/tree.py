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
from eagle_plugin.kernels.checks import check_all
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
    depth: int,
    logp: Tensor,
    tokens: Tensor,
    previous: Frontier | None,
    topk: int,
) -> Frontier:
    """Write the candidates of one depth into the table and return the best `topk`; see `core.tree.grow_level`."""
    native = function("grow_level", logp.device.type)
    if native is None:
        _check_level(table, offset, depth, logp, tokens, previous, topk)
        return oracle.grow_level(table, offset, depth, logp, tokens, previous, topk)
    if logp.dim() != 3:
        raise ValueError(f"logp has shape {list(logp.shape)}, wanted [b, Fp, k]: pass a tensor of that shape")
    b, rows, k = logp.shape
    keep = max(min(topk, rows * k), 0)
    frontier = Frontier(
        logp.new_empty(b, keep, dtype=torch.int32),
        logp.new_empty(b, keep),
        logp.new_empty(b, keep, dtype=torch.int64),
        logp.new_empty(b, keep, dtype=torch.int64),
        logp.new_empty(b, keep, dtype=torch.int64),
    )
    before = (None, None, None) if previous is None else (previous.candidates, previous.scores, previous.ancestors)
    native(*table, offset, depth, logp, tokens, *before, topk, *frontier)
    return frontier


def grow_levels(table: CandidateTable, depth: int, topk: int, logp: Tensor, tokens: Tensor) -> None:
    """Write all levels of trees whose children do not depend on the path above; see `core.tree.grow_levels`."""
    native = function("grow_levels", logp.device.type)
    if native is None:
        _check_levels(table, depth, topk, logp, tokens)
        oracle.grow_levels(table, depth, topk, logp, tokens)
        return
    native(*table, depth, topk, logp, tokens)


def select_tree(table: CandidateTable, root_tokens: Tensor, width: int) -> DraftTree:
    """Return the best width - 1 candidates and the root as a DraftTree; see `core.tree.select_tree`.

    A table in which a candidate's parent scores lower or comes after it gives ValueError on the CPU, and a tree of the
    root alone on CUDA.
    """
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"width is {width}, wanted 1 to 64: ancestors are one 64-bit bitmask per node")
    native = function("select_tree", root_tokens.device.type)
    if native is None:
        _check_table(table, len(root_tokens))
        check_all(("root_tokens", root_tokens, "int64 b"))
        return oracle.select_tree(table, root_tokens, width)
    b = root_tokens.shape[0]
    tree = DraftTree(
        root_tokens.new_empty(b, width),
        root_tokens.new_empty(b, width, dtype=torch.int32),
        root_tokens.new_empty(b, width, dtype=torch.int32),
        root_tokens.new_empty(b, width),
    )
    native(*table, root_tokens, *tree)
    return tree


def sibling_links(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first child and the next sibling of every node, [b, W] int64 each; see `core.links.sibling_links`."""
    native = function("sibling_links", parents.device.type)
    if native is None:
        check_all(("parents", parents, "int32 b W"))
        return links.sibling_links(parents)
    first_child, next_sibling = (torch.empty_like(parents, dtype=torch.int64) for _ in range(2))
    native(parents, first_child, next_sibling)
    return first_child, next_sibling


# The torch path's checks; those of csrc/bindings/tree.h.


def _check_table(table: CandidateTable, b: int) -> int:
    """Returns how many candidates the table holds."""
    return check_all(
        ("table.scores", table.scores, "float32 b C"),
        ("table.tokens", table.tokens, "int64 b C"),
        ("table.parents", table.parents, "int32 b C"),
        b=b,
    )["C"]


def _check_children(table: CandidateTable, logp: Tensor, tokens: Tensor) -> tuple[int, int, int, int]:
    """Returns the shape b, rows, k of the children, and how many candidates the table holds."""
    b, rows, k = check_all(("logp", logp, "float32 b R k"), ("tokens", tokens, "int64 b R k")).values()
    return b, rows, k, _check_table(table, b)


def _check_level(
    table: CandidateTable,
    offset: int,
    depth: int,
    logp: Tensor,
    tokens: Tensor,
    previous: Frontier | None,
    topk: int,
) -> None:
    b, rows, k, capacity = _check_children(table, logp, tokens)
    if previous is not None:
        check_all(
            ("previous.candidates", previous.candidates, "int32 b R"),
            ("previous.scores", previous.scores, "float32 b R"),
            ("previous.ancestors", previous.ancestors, "int64 b R"),
            b=b,
            R=rows,
        )
    elif rows != 1:
        raise ValueError(
            f"logp has {rows} rows per request, wanted 1 without a previous frontier: "
            "only the root has children at depth 1"
        )
    need, keep = offset + rows * k, min(topk, rows * k)
    if offset < 0 or need > capacity:
        raise ValueError(
            f"table holds {capacity} candidates, wanted at least {need} (offset {offset}): "
            "make it larger with new_table"
        )
    if depth < 1 or keep < 0 or (depth - 1) * topk + keep > MAX_WIDTH:
        raise ValueError(
            f"depth {depth} with topk {topk} needs draft slots up to {(depth - 1) * topk + keep}, wanted at most 64: "
            "lower the depth or topk"
        )


def _check_levels(table: CandidateTable, depth: int, topk: int, logp: Tensor, tokens: Tensor) -> None:
    _, rows, k, capacity = _check_children(table, logp, tokens)
    slots = (depth - 1) * topk
    if depth < 1 or topk < 1 or slots > MAX_WIDTH:
        raise ValueError(
            f"depth {depth} with topk {topk} needs {slots} draft slots, wanted at most 64, and a depth and a topk of "
            "at least 1: lower the depth or topk"
        )
    if rows != 1 + slots or k < topk:
        raise ValueError(
            f"logp has {rows} rows of {k} children per request, wanted {1 + slots} of at least {topk}: one for the "
            "root, then topk for each further depth"
        )
    if rows * k > capacity:
        raise ValueError(
            f"table holds {capacity} candidates, wanted at least {rows * k}: make it larger with new_table"
        )
