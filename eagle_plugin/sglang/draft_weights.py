"""Gives the linear layers of a draft head in SGLang int8 copies of their weights (`runtime.draft_weights`)."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.utils.common import use_intel_amx_backend
from torch import nn
from torch.nn.functional import linear

from eagle_plugin.kernels.int8_linear import Int8Weight
from eagle_plugin.runtime.draft_weights import Int8Method, int8_copy


class Int8Linear(nn.Module):
    """Replaces a plain torch linear layer, whose parameters keep their names: updates of weights look for these."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, packed: Int8Weight, original: Any) -> None:
        super().__init__()
        self.packed = packed
        self.register_parameter("weight", original.weight)
        self.register_parameter("bias", original.bias)
        self.in_features = original.in_features  # SGLang's class for block drafters compares it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed.linear(x, self.bias) if self.packed.serves(x) else linear(x, self.weight, self.bias)


def use_int8_weights(head: nn.Module, target: nn.Module) -> int:
    """Give the linear layers of the head int8 copies of their weights, the output layer even of weights that it shares
    with the target; returns how many.

    The originals are kept: the target, large batches and weight updates use them.
    """
    shared = {parameter.data_ptr() for parameter in target.parameters()}
    changed = 0
    for name, layer in list(head.named_modules()):
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, torch.Tensor):
            continue
        if use_intel_amx_backend(layer):
            continue  # its weights are in the order of AMX's tiles
        is_output = isinstance(layer, ParallelLMHead)
        engine_linear = isinstance(layer, LinearBase) and type(layer.quant_method) is UnquantizedLinearMethod
        own = weight.data_ptr() not in shared and (engine_linear or type(layer) is nn.Linear)
        if not (own or is_output):
            continue
        packed = int8_copy(weight.data)
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
