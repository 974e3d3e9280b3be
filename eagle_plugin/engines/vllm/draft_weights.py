"""Runs the linear layers of a draft head with int8 weights where that is faster: bfloat16 on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from eagle_plugin.kernels import ops  # noqa: F401  registers int8_linear
from eagle_plugin.kernels.int8_linear import pack


@contextmanager
def int8_weights() -> Iterator[None]:
    """Give the linear layers that are loaded meanwhile an int8 copy of their weights, for batches of a few rows.

    vLLM packs a layer's weights right after loading and drops the originals; that function is the place to read them.
    Layers that the head shares with its target are not loaded here. ``EAGLE_DRAFT_INT8=0`` switches it off.
    """
    if os.environ.get("EAGLE_DRAFT_INT8", "1") == "0":
        yield
        return
    dispatch = utils.dispatch_cpu_unquantized_gemm

    def with_copy(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight.data
        is_embedding = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
        packed = None if is_embedding else pack(weight)
        dispatch(layer, remove_weight=remove_weight)
        if packed is not None:
            # One operator for both ways, so that a compiled graph does not fix the way of its example.
            values, scales = packed
            layer.cpu_linear = lambda x, _, bias: torch.ops.eagle_plugin.int8_linear(x, values, scales, weight, bias)

    utils.dispatch_cpu_unquantized_gemm = with_copy
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = dispatch
