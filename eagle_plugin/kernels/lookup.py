"""Looked-up branches, in one launch each: C++ on the CPU, CUDA on a GPU, torch elsewhere.

TypeError and ValueError name an argument of a wrong dtype or shape. Values are checked on the CPU only.
"""

from __future__ import annotations

from torch import Tensor

from eagle_plugin.core import lookup as oracle
from eagle_plugin.core.lookup import CELLS, TokenHistory
from eagle_plugin.core.tree import CandidateTable
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.checks import check_all, check_values
from eagle_plugin.kernels.loader import function

__all__ = ["TokenHistory", "append_tokens", "look_up"]


def look_up(
    history: TokenHistory,
    table: CandidateTable,
    candidates: int,
    width: int,
    rows: Tensor,
    prefix_lens: Tensor,
    roots: Tensor,
) -> None:
    """Merge the looked-up path of each request into its candidates; see `core.lookup.look_up`."""
    native = function("look_up", rows.device.type)
    if native is not None:
        native(history, *table, candidates, width, rows, prefix_lens, roots)
        return
    size, steps = _check_history(history, rows, prefix_lens)
    capacity = check_all(
        ("table.scores", table.scores, "float32 b C"),
        ("table.tokens", table.tokens, "int64 b C"),
        ("table.parents", table.parents, "int32 b C"),
        ("roots", roots, "int64 b"),
        b=len(rows),
    )["C"]
    if not 0 <= candidates < capacity <= candidates + steps:
        raise ValueError(
            f"table holds {capacity} candidates, {candidates} of the head, wanted 1 to {steps} more: the history keeps "
            "paths of that length"
        )
    oracle.look_up(history, table, candidates, width, rows, prefix_lens, roots)


def append_tokens(history: TokenHistory, rows: Tensor, prefix_lens: Tensor, accepted: Accepted) -> None:
    """Note the accepted tokens of a round; see `core.lookup.append_tokens`."""
    native = function("append_tokens", rows.device.type)
    if native is not None:
        native(history, rows, prefix_lens, accepted.tokens, accepted.lengths)
        return
    _check_history(history, rows, prefix_lens)
    check_all(
        ("accepted.tokens", accepted.tokens, "int64 b E"),
        ("accepted.lengths", accepted.lengths, "int32 b"),
        b=len(rows),
    )
    oracle.append_tokens(history, rows, prefix_lens, accepted)


def _check_history(history: TokenHistory, rows: Tensor, prefix_lens: Tensor) -> tuple[int, int]:
    """The checks of csrc/bindings/lookup.h that both functions share; returns R and P."""
    sizes = check_all(
        ("history.tokens", history.tokens, "int32 R N"),
        ("history.begins", history.begins, "int64 R"),
        ("history.ends", history.ends, "int64 R"),
        ("history.path", history.path, "int32 R P"),
        ("history.cells", history.cells, "int32 R P"),
        ("history.doubts", history.doubts, "float32 R P"),
        ("history.starts", history.starts, "int64 R"),
        ("history.taken", history.taken, "int32 R"),
        ("history.expected", history.expected, f"float32 R {CELLS}"),
        ("history.missed", history.missed, f"float32 R {CELLS}"),
        ("history.counts", history.counts, "int64 R 2"),
        ("history.prior", history.prior, f"float32 {CELLS}"),
        ("rows", rows, "int64 b"),
        ("prefix_lens", prefix_lens, "int64 b"),
    )
    size = sizes["R"]
    check_values("rows[{at}] is {value}", rows, 0, size - 1, "the history has a row for each request")
    check_values("prefix_lens[{at}] is {value}", prefix_lens, 0, None, "it counts committed tokens")
    return size, sizes["P"]
