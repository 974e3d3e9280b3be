"""Penalties at every node of a tree and the counts that they need: C++ on the CPU, CUDA on a GPU, torch elsewhere.

The functions have the names, shapes and results of `core.penalties`, bit for bit. TypeError and ValueError name a wrong
input. Values are checked on the CPU only: on CUDA that would wait for the device, and a wrong row, token or length
changes nothing there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core import penalties as oracle
from eagle_plugin.core.penalties import Penalties
from eagle_plugin.core.shape import MAX_WIDTH
from eagle_plugin.kernels.checks import ANY, check
from eagle_plugin.kernels.loader import function

__all__ = ["Penalties", "count_tokens", "penalize_nodes"]


def penalize_nodes(
    logits: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    depths: Tensor,
    rows: Tensor,
    lengths: Tensor,
    penalties: Penalties,
) -> None:
    """Penalise the logits after every node of b trees, in place; see `core.penalties.penalize_nodes`.

    The rows of logits may have gaps. One launch; only logits of counted tokens and stop tokens are read or written.
    """
    native = function("penalize_nodes", logits.device.type)
    if native is not None:
        native(logits, tokens, ancestors, depths, rows, lengths, *penalties)
        return
    _check_nodes(logits, tokens, ancestors, depths, rows, lengths, penalties)
    oracle.penalize_nodes(logits, tokens, ancestors, depths, rows, lengths, penalties)


def count_tokens(counts: Tensor, rows: Tensor, tokens: Tensor, lengths: Tensor) -> None:
    """Count the tokens that a round yields, in place; see `core.penalties.count_tokens`."""
    native = function("count_tokens", counts.device.type)
    if native is not None:
        native(counts, rows, tokens, lengths)
        return
    _check_counted(counts, rows, tokens, lengths)
    oracle.count_tokens(counts, rows, tokens, lengths)


# The torch path's copy of the checks in csrc/bindings/penalties.h; the tests want the same sentences from both.


def _check_nodes(
    logits: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    depths: Tensor,
    rows: Tensor,
    lengths: Tensor,
    penalties: Penalties,
) -> None:
    check(tokens, "tokens", torch.int64, (ANY, ANY))
    b, width = tokens.shape
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"tokens has {width} nodes per request, wanted 1 to {MAX_WIDTH}: ancestors have 64 bits")
    check(ancestors, "ancestors", torch.int64, (b, width))
    check(depths, "depths", torch.int32, (b, width))
    check(logits, "logits", torch.float32, (b * width, ANY))
    check(rows, "rows", torch.int64, (b,))
    check(lengths, "lengths", torch.int64, (b,))
    check(penalties.counts, "penalties.counts", torch.int32, (ANY, logits.shape[1]))
    size = len(penalties.counts)
    check(penalties.frequency, "penalties.frequency", torch.float32, (size,))
    check(penalties.presence, "penalties.presence", torch.float32, (size,))
    check(penalties.repetition, "penalties.repetition", torch.float32, (size,))
    check(penalties.stops, "penalties.stops", torch.int64, (size, ANY))
    check(penalties.min_lens, "penalties.min_lens", torch.int64, (size,))
    _check_rows(rows, size)


def _check_counted(counts: Tensor, rows: Tensor, tokens: Tensor, lengths: Tensor) -> None:
    check(counts, "counts", torch.int32, (ANY, ANY))
    check(tokens, "tokens", torch.int64, (ANY, ANY))
    b, most = tokens.shape
    check(rows, "rows", torch.int64, (b,))
    check(lengths, "lengths", torch.int32, (b,))
    _check_rows(rows, len(counts))
    if not tokens.is_cpu:
        return
    vocabulary = counts.shape[1]
    for i, (length, yielded) in enumerate(zip(lengths.tolist(), tokens.tolist(), strict=True)):
        if not 0 <= length <= most:
            raise ValueError(f"lengths[{i}] is {length}, wanted 0 to {most}: pass the lengths of verify_tree")
        for j, token in enumerate(yielded[:length]):
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"tokens[{i}, {j}] is {token}, wanted 0 to {vocabulary - 1}: counts has a column per token"
                )


def _check_rows(rows: Tensor, size: int) -> None:
    if not rows.is_cpu:
        return
    for i, row in enumerate(rows.tolist()):
        if not 0 <= row < size:
            raise ValueError(f"rows[{i}] is {row}, wanted 0 to {size - 1}: the tables have a row for each request")
