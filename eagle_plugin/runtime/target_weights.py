"""Runs the linear layers of a target by our kernel where that is faster: bfloat16 on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eagle_plugin.kernels import (
    bf16_linear,
    ops,  # noqa: F401  (registers the operator)
)

SWITCH = "EAGLE_TARGET_LINEAR"


class Bf16Method:
    """Replaces the engine's linear method of one layer; what our kernel is not for goes to that method.

    The layer keeps its weights, so that exchanging them in place, adapters and large batches are as before.
    """

    def __init__(self, original: Any) -> None:
        self.original = original
        kernel = bf16_linear.native_kernel()
        # One compiled graph serves batches of any size.
        self.in_graphs = kernel is not None and kernel.max_rows == bf16_linear.ANY_ROWS

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The engine calls this for each forward of the layer."""
        weight: Tensor = layer.weight
        if torch.compiler.is_compiling():
            if self.in_graphs:
                return torch.ops.eagle_plugin.bf16_linear(x, weight, bias)  # type: ignore[no-any-return]
        elif bf16_linear.serves(x, weight):
            return bf16_linear.multiply(x, weight, bias)
        return self.original.apply(layer, x, bias)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def is_wanted() -> bool:
    """Whether the user leaves the choice to us."""
    return os.environ.get(SWITCH, "1") != "0"


def use_bf16_kernel(
    model: nn.Module, methods: tuple[type, ...], is_packed: Callable[[Any], bool] = lambda layer: False
) -> int:
    """Let our kernel run the layers of a model whose linear method is one of these; returns how many.

    It is 0 where there is no kernel for this CPU, or with ``EAGLE_TARGET_LINEAR=0``. Layers whose weights the engine
    keeps in another order are left out: by their dimensions, or because `is_packed` says so of the layer. The kernels
    of a CPU are looked for, and perhaps built, only where weights are.
    """
    if not is_wanted():
        return 0
    layers: list[Any] = [layer for layer in model.modules() if type(getattr(layer, "quant_method", None)) in methods]
    layers = [layer for layer in layers if _is_served(getattr(layer, "weight", None)) and not is_packed(layer)]
    if not layers or bf16_linear.native_kernel() is None:
        return 0
    for layer in layers:
        layer.quant_method = Bf16Method(layer.quant_method)
    return len(layers)


def _is_served(weight: Any) -> bool:
    return isinstance(weight, Tensor) and weight.is_cpu and weight.dim() == 2 and weight.dtype is torch.bfloat16
