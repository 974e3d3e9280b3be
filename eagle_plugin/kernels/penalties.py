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
from eagle_plugin.kernels.checks import check_all, check_values
from eagle_plugin.kernels.loader import function

__all__ = ["Penalties", "count_tokens", "penalize_nodes"]

# The checks of the torch path are those of csrc/bindings/penalties.h.
_ROWS = "the tables have a row for each request"


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
    b, width = check_all(("tokens", tokens, "int64 b W")).values()
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"tokens has {width} nodes per request, wanted 1 to {MAX_WIDTH}: ancestors have 64 bits")
    sizes = check_all(
        ("ancestors", ancestors, "int64 b W"),
        ("depths", depths, "int32 b W"),
        ("logits", logits, "float32 nodes V"),
        ("rows", rows, "int64 b"),
        ("lengths", lengths, "int64 b"),
        ("penalties.counts", penalties.counts, "int32 P V"),
        ("penalties.frequency", penalties.frequency, "float32 P"),
        ("penalties.presence", penalties.presence, "float32 P"),
        ("penalties.repetition", penalties.repetition, "float32 P"),
        ("penalties.stops", penalties.stops, "int64 P *"),
        ("penalties.min_lens", penalties.min_lens, "int64 P"),
        b=b,
        W=width,
        nodes=b * width,
    )
    check_values("rows[{at}] is {value}", rows, 0, sizes["P"] - 1, _ROWS)
    oracle.penalize_nodes(logits, tokens, ancestors, depths, rows, lengths, penalties)


def count_tokens(counts: Tensor, rows: Tensor, tokens: Tensor, lengths: Tensor) -> None:
    """Count the tokens that a round yields, in place; see `core.penalties.count_tokens`."""
    native = function("count_tokens", counts.device.type)
    if native is not None:
        native(counts, rows, tokens, lengths)
        return
    size, vocabulary, _, most = check_all(
        ("counts", counts, "int32 P V"),
        ("tokens", tokens, "int64 b E"),
        ("rows", rows, "int64 b"),
        ("lengths", lengths, "int32 b"),
    ).values()
    check_values("rows[{at}] is {value}", rows, 0, size - 1, _ROWS)
    check_values("lengths[{at}] is {value}", lengths, 0, most, "pass the lengths of verify_tree")
    counted = tokens.where(torch.arange(most, device=tokens.device) < lengths[:, None], 0)
    check_values("tokens[{at}] is {value}", counted, 0, vocabulary - 1, "counts has a column per token")
    oracle.count_tokens(counts, rows, tokens, lengths)
