"""vLLM's own Triton kernel for prompts over our cache, in Triton's interpreter, against our attention.

test_prompts_interpreted.py runs these tests, in a process that has Triton and its interpreter.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import vllm.triton_utils
from prompt_cases import DIM, FORWARDS, HEADS, KV_HEADS, forward
from torch import Tensor

from eagle_plugin.vllm.attention import TreeAttentionImpl
from eagle_plugin.vllm.prompt_attention import PromptKernel, TritonPromptsImpl, triton_kernel


@pytest.fixture(scope="module")
def kernel() -> PromptKernel:
    """The engine's kernel on the real Triton, in whose place vLLM puts a stand-in where it finds no GPU."""
    import triton
    import triton.language

    vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language
    return triton_kernel(importlib.import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention)


def served(kernel: PromptKernel, calls: list[int], **options: Any) -> TritonPromptsImpl:
    made = TritonPromptsImpl(HEADS, DIM, 0.2, KV_HEADS, **options)
    made.process_weights_after_loading(torch.float16)

    def attend(query: Tensor, *given: Any) -> Tensor:
        calls.append(len(query))
        return kernel.attend(query, *given)

    made.kernel = kernel._replace(attend=attend)
    return made


@pytest.mark.parametrize(
    ("name", "options", "chunk", "size"),
    [
        ("one prompt", {}, 0, 16),
        ("one prompt", {"kv_cache_dtype": "fp8"}, 0, 16),
        ("beside trees and plain requests", {"kv_cache_dtype": "fp8_e4m3"}, 0, 32),
        ("parts of prompts", {"sliding_window": 20}, 0, 16),
        ("parts of prompts", {"logits_soft_cap": 2.0}, 0, 32),
        ("parts of prompts", {}, 48, 16),
        ("beside trees and plain requests", {"sinks": torch.linspace(-1, 2, HEADS)}, 0, 16),
        ("beside trees and plain requests", {"sliding_window": 100}, 0, 8),
    ],
)
def test_the_kernel_over_our_cache(
    kernel: PromptKernel, name: str, options: dict[str, Any], chunk: int, size: int
) -> None:
    batch = forward(FORWARDS[name], size, float8="kv_cache_dtype" in options)
    calls: list[int] = []
    found = batch.by(served(kernel, calls, **options), chunk)
    plain = TreeAttentionImpl(HEADS, DIM, 0.2, KV_HEADS, **options)
    plain.process_weights_after_loading(torch.float16)
    torch.testing.assert_close(found, batch.by(plain, chunk), rtol=3e-3, atol=3e-3)
    assert calls == [sum(n for _, n, _ in FORWARDS[name] if n > 64)]


def test_the_kernel_over_other_blocks_is_noticed(kernel: PromptKernel) -> None:
    """Control."""
    batch = forward(FORWARDS["one prompt"])

    def attend(query: Tensor, keys: Tensor, values: Tensor, prompts: Any, *given: Any) -> Tensor:
        return kernel.attend(query, keys, values, prompts._replace(block_table=prompts.block_table.roll(1, 1)), *given)

    wanted = batch.by(TreeAttentionImpl(HEADS, DIM, 0.2, KV_HEADS))
    assert (batch.by(served(kernel._replace(attend=attend), [])) - wanted).abs().max() > 0.1
