"""Prompts by vLLM's kernels in our cache's blocks, against our own attention over the same cache.

vLLM's Triton kernel runs in Triton's interpreter in tests/engines/vllm/test_prompts_interpreted.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import CUDA, FakeLibrary, all_on_cuda
from flash_attention import check, flash_attention
from prompt_cases import DIM, FORWARDS, HEADS, KV_HEADS, WIDTH, forward
from torch import Tensor

from eagle_plugin.core.shape import MAX_WIDTH
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.runtime.round import TreeRows
from eagle_plugin.vllm import prompt_attention
from eagle_plugin.vllm.attention import ExtendRows, Rows, TreeAttentionImpl, TreeMetadata
from eagle_plugin.vllm.cache_layout import cache_rows, slot_table
from eagle_plugin.vllm.prompt_attention import FlashPromptsImpl, TritonPromptsImpl, flash_kernel, prompts_of


def layer(calls: list[dict[str, Any]], kv_heads: int = KV_HEADS, **options: Any) -> FlashPromptsImpl:
    """A layer as on a GPU, whose calls of FlashAttention are kept."""
    made = FlashPromptsImpl(HEADS, DIM, 0.2, kv_heads, **options)
    made.process_weights_after_loading(torch.float16)
    made.kernel = flash_kernel(lambda **arguments: (calls.append(arguments), flash_attention(**arguments))[1])
    return made


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("window", [None, 100, 20])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("kv_heads", [KV_HEADS, 1])
def test_prompts_against_our_attention(name: str, window: int | None, cap: float | None, kv_heads: int) -> None:
    batch = forward(FORWARDS[name], kv_heads=kv_heads)
    calls: list[dict[str, Any]] = []
    options: dict[str, Any] = {"sliding_window": window, "logits_soft_cap": cap}
    found = batch.by(layer(calls, kv_heads, **options))
    wanted = batch.by(TreeAttentionImpl(HEADS, DIM, 0.2, kv_heads, **options))
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
    (call,) = calls
    assert len(call["q"]) == sum(n for _, n, _ in FORWARDS[name] if n > MAX_WIDTH)
    assert (call["out"] is None) == (name == "beside trees and plain requests")  # no copy where all rows are prompts'
    assert {call["k"].untyped_storage().data_ptr(), call["v"].untyped_storage().data_ptr()} == {
        batch.cache.untyped_storage().data_ptr()
    }


@pytest.mark.parametrize(
    ("options", "chunk", "given"),
    [
        ({}, 48, {}),
        ({"sinks": torch.randn(HEADS)}, 0, {}),
        ({}, 0, {"dtype": torch.float32}),
        ({}, 0, {"size": 8}),
        ({"kv_cache_dtype": "fp8"}, 0, {"float8": True}),
    ],
    ids=["chunked attention", "sinks", "float32", "small blocks", "8-bit cache"],
)
def test_what_flash_attention_does_not_have_stays_with_our_kernel(
    options: dict[str, Any], chunk: int, given: dict[str, Any]
) -> None:
    batch = forward(FORWARDS["beside trees and plain requests"], **given)
    calls: list[dict[str, Any]] = []
    found = batch.by(layer(calls, **options), chunk)
    plain = TreeAttentionImpl(HEADS, DIM, 0.2, KV_HEADS, **options)
    plain.process_weights_after_loading(torch.float16)
    torch.testing.assert_close(found, batch.by(plain, chunk), rtol=2e-3, atol=2e-3)
    assert not calls


def test_short_prompts_alone_call_nothing() -> None:
    batch, calls = forward([(0, MAX_WIDTH, False), (5, 2, False)]), list[dict[str, Any]]()
    found = batch.by(layer(calls))
    torch.testing.assert_close(found, batch.by(TreeAttentionImpl(HEADS, DIM, 0.2, KV_HEADS)), rtol=2e-3, atol=2e-3)
    assert not calls


def test_blocks_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""

    def shifted(*given: Any) -> Any:
        prompts = prompts_of(*given)
        assert prompts is not None
        return prompts._replace(block_table=prompts.block_table.roll(1, 1))

    monkeypatch.setattr(prompt_attention, "prompts_of", shifted)
    batch = forward(FORWARDS["one prompt"])
    wanted = batch.by(TreeAttentionImpl(HEADS, DIM, 0.2, KV_HEADS))
    assert (batch.by(layer([])) - wanted).abs().max() > 0.1


def test_all_layers_share_one_plan() -> None:
    batch, calls = forward(FORWARDS["parts of prompts"]), list[dict[str, Any]]()
    for _ in range(2):
        batch.by(layer(calls))
    assert calls[0]["block_table"] is calls[1]["block_table"]


def test_a_machine_without_flash_attention() -> None:
    """Then all prompts are chains; so it is on a CPU, and where vLLM takes version 4."""
    assert FlashPromptsImpl.find_kernel(64, False, False) is None
    assert FlashPromptsImpl(HEADS, DIM, 0.2, KV_HEADS).kernel is None
    kernel = TritonPromptsImpl.find_kernel(64, False, False)
    assert kernel is not None and kernel.page == 1 and kernel.chunks and kernel.sinks


def test_prompts_over_8_bit_caches_have_the_triton_kernel() -> None:
    """FlashAttention would round the queries too."""
    kernel = FlashPromptsImpl(HEADS, DIM, 0.2, KV_HEADS, kv_cache_dtype="fp8").kernel
    assert kernel is not None and kernel.float8


@pytest.mark.parametrize("with_tree", [False, True])
def test_nothing_is_read_by_the_host(library: FakeLibrary, with_tree: bool) -> None:
    """On fake CUDA tensors: prompts alone, and beside a plain request and a tree."""
    lens = [70, 90, 1] if with_tree else [70, 90]
    calls: list[int] = []

    def flash(**given: Any) -> Tensor:
        tensors = [given[name] for name in ("q", "k", "v", "cu_seqlens_q", "seqused_k", "block_table")]
        assert all_on_cuda(*tensors)
        check(*tensors, given["out"])
        calls.append(len(given["q"]))
        return torch.empty_like(given["q"])

    before = torch.full((len(lens) + 1,), 9, device=CUDA)
    new = torch.tensor([*lens, WIDTH], device=CUDA)
    others, starts = torch.arange(len(lens), device=CUDA), new.cumsum(0) - new
    extend = ExtendRows(others, (before + new)[:-1], new[:-1], starts[:-1])
    tree = query = None
    if with_tree:
        tree = TreeRows(others[-1:] + 1, before[-1:], chain_ancestors(WIDTH, CUDA)[None], WIDTH)
        query = starts[-1:] + torch.arange(WIDTH, device=CUDA)
    n = sum(lens) + (WIDTH if with_tree else 0)
    cache = torch.zeros(40, 16, KV_HEADS, 2 * DIM, dtype=torch.bfloat16, device=CUDA).permute(0, 2, 1, 3)
    table = slot_table(torch.zeros(len(before), 8, dtype=torch.int32, device=CUDA), 16, 128)
    metadata = TreeMetadata(Rows(extend, tree, query, lens), table, torch.zeros(n, dtype=torch.int64, device=CUDA))
    q, k = (torch.zeros(n, heads, DIM, dtype=torch.bfloat16, device=CUDA) for heads in (HEADS, KV_HEADS))
    made = layer([])
    made.kernel = flash_kernel(flash)
    made._rows_of = cache_rows  # type: ignore[method-assign]  # fake tensors have no address
    library.launched.clear()
    assert all_on_cuda(made.forward(None, q, k, k, cache, metadata, torch.zeros_like(q)))
    assert calls == [160]
    assert library.launched == ["store_kv", *["tree_attention (Triton)"] * (2 if with_tree else 0)]
