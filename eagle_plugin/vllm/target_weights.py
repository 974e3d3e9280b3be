"""Lets our kernel run the linear layers of a target in vLLM on CPUs whose weights vLLM leaves as they are."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from eagle_plugin.kernels import bf16_linear
from eagle_plugin.runtime import target_weights


def use_bf16_kernel(model: Any, model_config: Any) -> int:
    """Let our kernel run the layers without quantization; returns how many.

    It is 0 on a GPU, where the kernels of a CPU are not even looked for, and where oneDNN multiplies pairs of bfloat16:
    there vLLM keeps weights in oneDNN's order, and ours would need a second copy of them. With AVX2 alone oneDNN has no
    such product, and vLLM takes torch's.
    """
    if not next(model.parameters()).is_cpu:
        return 0
    kernel = bf16_linear.native_kernel()
    if kernel is None or kernel.max_rows != bf16_linear.ANY_ROWS:
        return 0
    methods: tuple[type, ...] = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    if model_config.head_dtype not in (None, model_config.dtype):
        methods = methods[:1]  # vLLM wants an output layer with its own method, to compute it in another dtype
    return target_weights.use_bf16_kernel(model, methods)
