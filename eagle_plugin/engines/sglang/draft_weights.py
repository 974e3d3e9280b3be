"""Runs the linear layers of a draft head with int8 weights where that is faster: bfloat16 on a CPU."""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from torch import nn

from eagle_plugin.kernels.int8_linear import Int8Weight, pack, serves


class Int8Method:
    """Replaces the engine's linear method of one layer; large batches go to that method."""

    def __init__(self, weight: Int8Weight, original: Any) -> None:
        self.packed, self._original = weight, original

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if serves(x):
            return self.packed.linear(x, bias)
        return self._original.apply(layer, x, bias)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class Int8Linear(nn.Module):
    """Replaces a plain torch linear layer."""

    def __init__(self, weight: Int8Weight, original: nn.Linear) -> None:
        super().__init__()
        self.packed, self.original = weight, original

    @property
    def weight(self) -> torch.Tensor:
        return self.original.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed.linear(x, self.original.bias) if serves(x) else self.original(x)


def use_int8_weights(head: nn.Module, target: nn.Module) -> int:
    """Give every linear layer that the head does not share an int8 copy of its weights; returns how many.

    Weights shared with the target stay as they are, and the originals are kept: prefill and weight updates use them.
    ``EAGLE_DRAFT_INT8=0`` switches it off.
    """
    if os.environ.get("EAGLE_DRAFT_INT8", "1") == "0":
        return 0
    shared = {parameter.data_ptr() for parameter in target.parameters()}
    changed = 0
    for name, layer in list(head.named_modules()):
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.data_ptr() in shared:
            continue
        engine_linear = isinstance(layer, LinearBase) and type(layer.quant_method) is UnquantizedLinearMethod
        if not (engine_linear or isinstance(layer, ParallelLMHead) or type(layer) is nn.Linear):
            continue
        packed = pack(weight.data)
        if packed is None:
            continue
        if type(layer) is nn.Linear:
            parent, _, own_name = name.rpartition(".")
            setattr(head.get_submodule(parent), own_name, Int8Linear(packed, layer))
        else:
            layer.quant_method = Int8Method(packed, layer.quant_method)
        changed += 1
    return changed


def int8_weights(head: nn.Module) -> dict[str, Int8Weight]:
    """The int8 copies that `use_int8_weights` made, by the name of their layer."""
    found = {}
    for name, layer in head.named_modules():
        owner = layer if isinstance(layer, Int8Linear) else getattr(layer, "quant_method", None)
        if isinstance(owner, Int8Linear | Int8Method):
            found[name] = owner.packed
    return found
