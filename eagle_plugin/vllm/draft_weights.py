"""Gives the linear layers of a draft head in vLLM int8 copies of their weights (`runtime.draft_weights`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from eagle_plugin.kernels.int8_linear import native_kernel
from eagle_plugin.runtime.draft_weights import Int8Method, int8_copy

# The engine's methods of layers without quantization, and the layers whose weights are rounded.
KINDS = ((UnquantizedLinearMethod, LinearBase), (UnquantizedEmbeddingMethod, ParallelLMHead))


@contextmanager
def int8_weights(device_type: str) -> Iterator[None]:
    """Linear layers that are loaded inside, on a CPU, get int8 copies, made before the engine packs their weights away.

    The kernels of a CPU are looked for, and perhaps built, on a CPU alone.
    """
    if device_type != "cpu" or native_kernel() is None:  # torch's is slower than the engine's bfloat16
        yield
        return
    before = [method.process_weights_after_loading for method, _ in KINDS]
    for (method, kind), original in zip(KINDS, before, strict=True):
        method.process_weights_after_loading = _with_copy(original, kind)
    try:
        yield
    finally:
        for (method, _), original in zip(KINDS, before, strict=True):
            method.process_weights_after_loading = original


def _with_copy(original: Callable[..., None], kind: Any) -> Callable[..., None]:
    def process(method: Any, layer: Any) -> None:
        packed = int8_copy(layer.weight.data) if isinstance(layer, kind) else None
        original(method, layer)
        if packed is not None:
            layer.quant_method = Int8Method(packed, method)

    return process


def own_method(layer: Any) -> Any:
    """The engine's method of a layer, also where ours replaces it."""
    return getattr(layer.quant_method, "original", layer.quant_method)


def use_int8_output(head: Any) -> None:
    """Let the head have an int8 copy of an output layer that it shares with the target, which keeps its own.

    Where logits are asked for in another dtype than the model's, the engine wants an output layer without quantization.
    A quantised output layer, whose weights may have other names, drafts by the engine's method.
    """
    layer = head.lm_head
    if type(own_method(layer)) is not UnquantizedEmbeddingMethod:
        return
    processor = getattr(head, "logits_processor", None) or head.model.logits_processor  # MTP layers have it inside
    if processor.head_dtype not in (None, layer.weight.dtype):
        layer.quant_method = own_method(layer)
    elif layer.weight.is_cpu and native_kernel() is not None:
        packed = int8_copy(layer.weight.data)
        if packed is not None:
            head.lm_head = copy.copy(layer)
            head.lm_head.quant_method = Int8Method(packed, layer.quant_method)
            # Some MTP layers have the same output layer under a name of their own.
            for module in list(head.modules()):
                if getattr(module, "head", None) is layer:
                    module.head = head.lm_head
