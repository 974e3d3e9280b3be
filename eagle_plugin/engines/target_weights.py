"""Runs the linear layers of a target by our kernel where a batch has few rows: bfloat16 on a CPU."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from eagle_plugin.kernels import bf16_linear


class FewRowsMethod:
    """Replaces the engine's linear method of one layer; what our kernel is not for goes to that method.

    The layer keeps its weights, so that exchanging them in place, adapters and large batches are as before.
    """

    def __init__(self, original: Any) -> None:
        self.original = original

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The engine calls this for each forward of the layer."""
        weight: Tensor = layer.weight
        if not torch.compiler.is_compiling() and bf16_linear.serves(x, weight):
            return bf16_linear.multiply(x, weight, bias)
        return self.original.apply(layer, x, bias)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def use_few_rows(model: nn.Module, methods: tuple[type, ...]) -> int:
    """Let our kernel run the layers of a model whose linear method is one of these; returns how many.

    It is 0 where there is no kernel for this CPU, or with ``EAGLE_TARGET_LINEAR=0``.
    """
    if os.environ.get("EAGLE_TARGET_LINEAR", "1") == "0" or bf16_linear.native_kernel() is None:
        return 0
    layers: list[Any] = [layer for layer in model.modules() if type(getattr(layer, "quant_method", None)) in methods]
    layers = [layer for layer in layers if _is_served(getattr(layer, "weight", None))]
    for layer in layers:
        layer.quant_method = FewRowsMethod(layer.quant_method)
    return len(layers)


def _is_served(weight: Any) -> bool:
    return isinstance(weight, Tensor) and weight.is_cpu and weight.dim() == 2 and weight.dtype is torch.bfloat16
