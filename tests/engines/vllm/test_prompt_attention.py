"""Prompts by FlashAttention in our cache's blocks, against our own attention over the same cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from fake_cuda import CUDA, FakeLibrary, all_on_cuda
from flash_attention import check, flash_attention
from torch import Tensor

from eagle_plugin.core.shape import MAX_WIDTH
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.engines.round import TreeRows
from eagle_plugin.engines.vllm import prompt_attention
from eagle_plugin.engines.vllm.attention import (
    ExtendRows,
    Rows,
    TreeAttentionImpl,
    TreeMetadata,
    cache_rows,
    slot_table,
)
from eagle_plugin.engines.vllm.prompt_attention import FlashPromptsImpl, find_flash_attention, prompts_of

KV_HEADS, HEADS, DIM, WIDTH, TOKENS = 2, 6, 32, 4, 320


class Forward(NamedTuple):
    """One forward of a layer over a random cache."""

    cache: Tensor
    metadata: TreeMetadata
    query: Tensor

    def by(self, layer: TreeAttentionImpl, chunk: int = 0) -> Tensor:
        rows, slots = cache_rows(self.cache), self.metadata.slots
        out = torch.full_like(self.query, torch.nan)
        own = rows.keys[slots], rows.values[slots]
        return layer.forward(
            SimpleNamespace(attention_chunk_size=chunk), self.query, *own, self.cache, self.metadata, out
        )


def forward(
    requests: list[tuple[int, int, bool]], size: int = 16, dtype: torch.dtype = torch.float16, kv_heads: int = KV_HEADS
) -> Forward:
    """requests: tokens before this forward, its rows, and whether those are the nodes of a tree."""
    torch.manual_seed(3)
    b, each = len(requests), TOKENS // size
    cache = torch.randn(b * each, size, kv_heads, 2 * DIM).to(dtype).permute(0, 2, 1, 3)
    table = slot_table(torch.randperm(b * each).view(b, each).int(), size, TOKENS)
    before, lens = (torch.tensor([request[i] for request in requests]) for i in (0, 1))
    starts = lens.cumsum(0) - lens
    trees = torch.tensor([i for i, request in enumerate(requests) if request[2]], dtype=torch.int64)
    others = torch.tensor([i for i, request in enumerate(requests) if not request[2]], dtype=torch.int64)
    extend = ExtendRows(others, (before + lens)[others], lens[others], starts[others])
    tree = query = None
    if len(trees):
        ancestors = chain_ancestors(WIDTH, cache.device)
        ancestors[2] = 1 | 4  # a second child of the root
        tree = TreeRows(trees, before[trees], ancestors.repeat(len(trees), 1), WIDTH)
        query = (starts[trees, None] + torch.arange(WIDTH)).view(-1)
    rows = Rows(extend if len(others) else None, tree, query, lens[others].tolist())
    slots = torch.cat([table[i, n : n + new] for i, (n, new, _) in enumerate(requests)]).long()
    return Forward(cache, TreeMetadata(rows, table, slots), torch.randn(len(slots), HEADS, DIM).to(dtype))


def layer(calls: list[dict[str, Any]], kv_heads: int = KV_HEADS, **options: Any) -> FlashPromptsImpl:
    """A layer as on a GPU, whose calls of FlashAttention are kept."""
    made = FlashPromptsImpl(HEADS, DIM, 0.2, kv_heads, **options)
    made.process_weights_after_loading(torch.float16)
    made._flash = lambda **arguments: (calls.append(arguments), flash_attention(**arguments))[1]
    return made


FORWARDS = {
    "one prompt": [(0, 200, False)],
    "parts of prompts": [(0, 65, False), (90, 130, False), (17, 70, False)],
    "beside trees and plain requests": [
        (3, 1, False),
        (40, 100, False),
        (9, 4, True),
        (21, 12, False),
        (100, 66, False),
    ],
}


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
    ],
    ids=["chunked attention", "sinks", "float32", "small blocks"],
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
    assert find_flash_attention(64, False) is None


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
    made._flash = flash
    made._rows_of = cache_rows  # type: ignore[method-assign]  # fake tensors have no address
    library.launched.clear()
    assert all_on_cuda(made.forward(None, q, k, k, cache, metadata, torch.zeros_like(q)))
    assert calls == [160]
    assert library.launched == ["store_kv", *["tree_attention (Triton)"] * (2 if with_tree else 0)]
