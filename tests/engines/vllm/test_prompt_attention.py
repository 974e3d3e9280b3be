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
from vllm.v1.attention.backends import fa_utils

from eagle_plugin.core.shape import MAX_WIDTH
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.runtime.round import TreeRows
from eagle_plugin.vllm import prompt_attention
from eagle_plugin.vllm.attention import ExtendRows, Rows, TreeAttentionImpl, TreeMetadata
from eagle_plugin.vllm.cache_layout import cache_rows, slot_table
from eagle_plugin.vllm.prompt_attention import PAGE, SINKS, FlashPromptsImpl, flash_kernel, prompts_of


def layer(calls: list[dict[str, Any]], kv_heads: int = KV_HEADS, version: int = 2, **options: Any) -> FlashPromptsImpl:
    """A layer as on a GPU, whose calls of FlashAttention are kept."""
    made = FlashPromptsImpl(HEADS, DIM, 0.2, kv_heads, **options)
    made.process_weights_after_loading(torch.float16)

    def flash(**arguments: Any) -> Tensor:
        calls.append(arguments)
        return flash_attention(**arguments)

    made.kernel = flash_kernel(flash, version in SINKS)
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


@pytest.mark.parametrize("window", [None, 20])
def test_sinks(window: int | None) -> None:
    """Version 3 has them, and takes them as the model has them, in bfloat16."""
    sinks = torch.randn(HEADS).bfloat16()
    batch, calls = forward(FORWARDS["parts of prompts"], dtype=torch.bfloat16), list[dict[str, Any]]()
    options: dict[str, Any] = {"sinks": sinks, "sliding_window": window}
    found = batch.by(layer(calls, version=3, **options))
    plain = TreeAttentionImpl(HEADS, DIM, 0.2, KV_HEADS, **options)
    plain.process_weights_after_loading(torch.bfloat16)
    torch.testing.assert_close(found, batch.by(plain), rtol=2e-2, atol=2e-2)
    (call,) = calls
    assert torch.equal(call["s_aux"], sinks) and call["s_aux"].dtype == torch.bfloat16
    without = batch.by(layer([], version=3, sliding_window=window))
    assert (without - found).abs().max() > 0.1


def versions(monkeypatch: pytest.MonkeyPatch, version: int | None) -> list[dict[str, Any]]:
    """vLLM takes this version of FlashAttention; the layers that it was asked about."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda **layer: (asked.append(layer), version)[1])
    return asked


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("version", [None, 2, 3, 4])
def test_every_gpu_has_a_kernel(version: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that vLLM takes, also of a Blackwell GPU; the Triton kernel where it takes none, or has no sinks."""
    asked = versions(monkeypatch, version)
    kernel = FlashPromptsImpl.find_kernel(64, False, False, sinks)
    assert kernel is not None and asked == [{"head_size": 64, "has_sinks": sinks, "requires_softcap": False}]
    assert kernel.chunks == (version is None or (sinks and version == 2))  # it is the Triton kernel
    batch = forward(FORWARDS["one prompt"], dtype=torch.bfloat16)
    query, cache = batch.query, cache_rows(batch.cache)
    options = {"window": -1, "chunk": 0, "sinks": torch.zeros(HEADS) if sinks else None}
    assert kernel.takes(query, cache, PAGE, options)
    assert kernel.takes(query.half(), cache, PAGE, options) == (not sinks or kernel.chunks)


def test_a_layer_tells_whether_it_has_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, 2)
    kernels = [FlashPromptsImpl(HEADS, DIM, 0.2, KV_HEADS, sinks=sinks).kernel for sinks in (None, torch.ones(HEADS))]
    assert [kernel is not None and kernel.chunks for kernel in kernels] == [False, True]


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
    made.kernel = flash_kernel(flash, sinks=False)
    made.rows_of = cache_rows  # type: ignore[method-assign]  # fake tensors have no address
    library.launched.clear()
    assert all_on_cuda(made.forward(None, q, k, k, cache, metadata, torch.zeros_like(q)))
    assert calls == [160]
    assert library.launched == ["store_kv", *["tree_attention (Triton)"] * (2 if with_tree else 0)]
