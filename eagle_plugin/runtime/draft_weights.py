"""Runs the linear layers of a draft head with int8 weights where that is faster: bfloat16 on a CPU."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from eagle_plugin.kernels import ops  # noqa: F401  (registers the operator)
from eagle_plugin.kernels.int8_linear import MAX_ROWS, Int8Weight, max_rows, pack

SWITCH = "EAGLE_DRAFT_INT8"


class Int8Method:
    """Replaces the engine's linear method of one layer; batches that bfloat16 is faster for go to that method."""

    def __init__(self, weight: Int8Weight, original: Any) -> None:
        self.packed, self.original = weight, original
        # One compiled graph serves batches of any size.
        self.in_graphs = weight.values.dim() == 4 and max_rows() >= MAX_ROWS

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The engine calls this for each forward of the layer."""
        if torch.compiler.is_compiling():
            if self.in_graphs:
                out = torch.ops.eagle_plugin.int8_linear(x, *self.packed)
                return out if bias is None else out + bias
        elif self.packed.serves(x):
            return self.packed.linear(x, bias)
        return self.original.apply(layer, x, bias)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def int8_copy(weight: Tensor) -> Int8Weight | None:
    """The int8 copy of a layer's weights; None where there is no kernel, or with ``EAGLE_DRAFT_INT8=0``."""
    return pack(weight) if is_wanted() else None


def is_wanted() -> bool:
    """Whether the user leaves the choice to us."""
    return os.environ.get(SWITCH, "1") != "0"
