"""The linear layers as torch operators, ``torch.ops.eagle_plugin.*``, for torch.compile in an engine.

Importing this module registers them. An operator has a fake implementation, so that a traced graph knows the shapes
without running it. All other kernels are called directly: an operator adds a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eagle_plugin.kernels import bf16_linear
from eagle_plugin.kernels.int8_linear import Int8Weight

LIBRARY = torch.library.Library("eagle_plugin", "DEF")


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        name = LIBRARY.define(schema)
        LIBRARY.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"eagle_plugin::{name}", fake, lib=LIBRARY)
        return body

    return register


@_operator(
    "int8_linear(Tensor x, Tensor values, Tensor scales) -> Tensor",
    lambda x, values, scales: x.new_empty(*x.shape[:-1], scales.shape[0]),
)
def _int8_linear(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    return Int8Weight(values, scales).linear(x)


@_operator(
    "bf16_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
)
def _bf16_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return bf16_linear.linear(x, weight, bias)
