"""The attention backend inside vLLM's cache blocks, against plain indexing and plain torch attention."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from eagle_plugin.kernels.attention import extend_attention
from eagle_plugin.runtime.round import TreeRows
from eagle_plugin.vllm.attention import (
    ExtendRows,
    Rows,
    TreeAttentionImpl,
    TreeMetadata,
    TreeMetadataBuilder,
    attend_chains,
    chains_of,
)
from eagle_plugin.vllm.cache_layout import CacheRows, cache_rows, slot_table

BLOCKS, KV_HEADS, HEADS, SIZE, DIM = 12, 2, 6, 16, 32
PARENTS = [-1, 0, 0, 1]  # of every tree here


def make_cache() -> Tensor:
    """A layer's cache as vLLM shows it in layout LBNHC: [blocks, Hkv, block size, 2 * D], heads inside of tokens."""
    return torch.full((BLOCKS, SIZE, KV_HEADS, 2 * DIM), torch.nan).permute(0, 2, 1, 3)


def positions_of(node: int) -> list[int]:
    """The nodes from the root down to this one."""
    return ([] if node == 0 else positions_of(PARENTS[node])) + [node]


# ---------------------------------------------------------------------------------------------------------------------
# Rows of the cache


def test_a_block_holds_the_rows_of_its_tokens_and_no_others() -> None:
    """vLLM zeroes, shares and frees blocks; each must be the keys and values of its own tokens."""
    cache = make_cache()
    rows = cache_rows(cache)
    for row in range(BLOCKS * SIZE):
        rows.keys[row], rows.values[row] = row, -row
    for row in range(BLOCKS * SIZE):
        token = cache[row // SIZE, :, row % SIZE]  # [Hkv, 2 * D]
        assert (token[:, :DIM] == row).all() and (token[:, DIM:] == -row).all()


@pytest.mark.parametrize("change", [lambda cache: cache[:, :1], lambda cache: cache.contiguous()])
def test_a_cache_of_another_layout_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"wants the layout LBNHC.*EAGLE_PLUGIN=0"):
        cache_rows(change(make_cache()))


def test_slots_against_plain_indexing() -> None:
    table = torch.randperm(BLOCKS)[:6].view(2, 3).int()
    for positions in (1, SIZE, SIZE + 1, 40, 100):
        found = slot_table(table, SIZE, positions)
        assert found.dtype == torch.int32 and found.shape[1] >= positions
        for i in range(2):
            for p in range(found.shape[1]):
                block = int(table[i, p // SIZE]) if p < 3 * SIZE else None
                assert found[i, p] == (0 if block is None else block * SIZE + p % SIZE)


# ---------------------------------------------------------------------------------------------------------------------
# A forward of one layer


class Batch:
    """Requests in a cache: tokens before this forward, new rows, and whether those are nodes of a tree."""

    def __init__(self, requests: list[tuple[int, int, bool]]) -> None:
        torch.manual_seed(0)
        self.requests, self.cache = requests, make_cache()
        rows = cache_rows(self.cache)
        self.blocks = torch.randperm(BLOCKS).view(-1, 3)[: len(requests)].int()
        table = slot_table(self.blocks, SIZE, 3 * SIZE).long()
        self.query = torch.randn(sum(new for _, new, _ in requests), HEADS, DIM)
        self.key, self.value = torch.randn(2, len(self.query), KV_HEADS, DIM)
        self.keys, self.values, slots = [], [], []  # of each request at each position
        start = 0
        for i, (before, new, _) in enumerate(requests):
            old = torch.randn(2, before, KV_HEADS, DIM)
            rows.keys[table[i, :before]], rows.values[table[i, :before]] = old
            self.keys.append(torch.cat([old[0], self.key[start : start + new]]))
            self.values.append(torch.cat([old[1], self.value[start : start + new]]))
            slots.append(table[i, before : before + new])
            start += new
        self.slots = torch.cat(slots)

    def metadata(self) -> TreeMetadata:
        starts = torch.tensor([new for _, new, _ in self.requests]).cumsum(0)
        starts = starts - torch.tensor([new for _, new, _ in self.requests])
        trees = torch.tensor([i for i, (_, _, tree) in enumerate(self.requests) if tree], dtype=torch.int64)
        others = torch.tensor([i for i, (_, _, tree) in enumerate(self.requests) if not tree], dtype=torch.int64)
        before = torch.tensor([before for before, _, _ in self.requests])
        lens = torch.tensor([new for _, new, _ in self.requests])
        extend = tree = query = None
        if len(others):
            extend = ExtendRows(others, (before + lens)[others], lens[others], starts[others])
        if len(trees):
            width = len(PARENTS)
            ancestors = torch.tensor([sum(1 << j for j in positions_of(node)) for node in range(width)])
            query = (starts[trees, None] + torch.arange(width)).view(-1) if len(others) else None
            tree = TreeRows(trees, before[trees], ancestors.repeat(len(trees), 1), width)
        return TreeMetadata(Rows(extend, tree, query), slot_table(self.blocks, SIZE, 3 * SIZE), self.slots)

    def wanted(self, window: int | None, chunk: int, cap: float | None, sinks: Tensor | None) -> Tensor:
        """Attention of every row by softmax over the keys that it sees."""
        out, at = torch.empty_like(self.query), 0
        for i, (before, new, tree) in enumerate(self.requests):
            for row in range(new):
                path = [before + node for node in (positions_of(row) if tree else range(row + 1))]
                position = before + len(path) - 1
                keys = {p: p for p in range(before)} | {before + depth: p for depth, p in enumerate(path)}
                near = [p for p in keys if window is None or position - p < window]
                seen = [keys[p] for p in near if not chunk or p // chunk == position // chunk]
                keys = self.keys[i][seen].repeat_interleave(HEADS // KV_HEADS, dim=1)
                values = self.values[i][seen].repeat_interleave(HEADS // KV_HEADS, dim=1)
                logits = torch.einsum("hd,phd->hp", self.query[at], keys) * 0.2
                logits = logits if cap is None else cap * torch.tanh(logits / cap)
                if sinks is not None:
                    logits = torch.cat([logits, sinks[:, None]], dim=1)
                p = logits.softmax(dim=1)[:, : len(seen)]
                out[at] = torch.einsum("hp,phd->hd", p, values)
                at += 1
        return out

    def served(self, metadata: TreeMetadata, chunk: int = 0, **options: Any) -> Tensor:
        layer = TreeAttentionImpl(HEADS, DIM, 0.2, KV_HEADS, **options)
        layer.process_weights_after_loading(torch.float32)
        out = torch.full_like(self.query, torch.nan)
        of_vllm = types.SimpleNamespace(attention_chunk_size=chunk) if chunk else None
        return layer.forward(of_vllm, self.query, self.key, self.value, self.cache, metadata, out)


MIXED = [(0, 5, False), (37, 4, True), (20, 3, False), (3, 4, True)]
BATCHES = {
    "mixed": MIXED,
    "trees": [(37, 4, True), (3, 4, True)],
    "prefill and decode": [(0, 40, False), (21, 1, False)],
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("window", "chunk"), [(None, 0), (9, 0), (2, 0), (None, 13)])  # 13: 39 is inside a tree
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_forward_against_softmax(
    name: str, window: int | None, chunk: int, cap: float | None, with_sinks: bool
) -> None:
    batch = Batch(BATCHES[name])
    sinks = torch.randn(HEADS) if with_sinks else None
    found = batch.served(batch.metadata(), chunk, sliding_window=window, logits_soft_cap=cap, sinks=sinks)
    torch.testing.assert_close(found, batch.wanted(window, chunk, cap, sinks), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BATCHES)
def test_padding_of_a_graph_is_not_written(name: str) -> None:
    """Around a CUDA graph the layers get more rows than the batch has, and no slots for them."""
    batch = Batch(BATCHES[name])
    n, wanted = len(batch.query), batch.wanted(None, 0, None, None)
    metadata = batch.metadata()
    batch.query, batch.key, batch.value = (
        pad(x, (0, 0, 0, 0, 0, 7), value=3.0) for x in (batch.query, batch.key, batch.value)
    )
    found = batch.served(metadata)
    torch.testing.assert_close(found[:n], wanted, rtol=1e-4, atol=1e-5)
    assert len(found) == n + 7 and found[n:].isnan().all()


def test_siblings_do_not_see_each_other() -> None:
    """Control: the same rows as a plain chunk give other outputs from the second child on."""
    batch = Batch([(20, 4, True)])
    tree = batch.served(batch.metadata())
    batch.requests = [(20, 4, False)]
    chunk = batch.served(batch.metadata())
    torch.testing.assert_close(tree[:2], chunk[:2])
    assert not torch.allclose(tree[2:], chunk[2:], atol=1e-2)


def test_a_builder_without_trees_is_causal() -> None:
    """What vLLM hands every builder is enough for prefills and plain decodes."""
    batch = Batch(BATCHES["prefill and decode"])
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32)
    config = types.SimpleNamespace(num_lookahead_tokens=7)
    builder = TreeMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
    bounds = torch.tensor([0, 40, 41], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=bounds,
        query_start_loc_cpu=bounds,
        seq_lens=torch.tensor([40, 22], dtype=torch.int32),
        num_reqs=2,
        num_actual_tokens=41,
        max_query_len=40,
        max_seq_len=40,
        block_table_tensor=batch.blocks,
        slot_mapping=batch.slots,
    )
    metadata = builder.build(0, common)
    assert metadata.slot_table.shape[1] >= 40 + 8  # a whole draft fits after the longest sequence
    torch.testing.assert_close(batch.served(metadata), batch.wanted(None, 0, None, None), rtol=1e-4, atol=1e-5)


def test_a_warm_up_without_a_cache_leaves_zeros() -> None:
    """In what vLLM allocates there may be NaN, which would choose the experts of a layer."""
    layer, rows = TreeAttentionImpl(HEADS, DIM, 0.2, KV_HEADS), torch.ones(3, HEADS, DIM)
    fresh = torch.full_like(rows, torch.nan)
    out = layer.forward(None, rows, rows[:, :KV_HEADS], rows[:, :KV_HEADS], torch.empty(0), None, fresh)
    assert out is fresh and torch.equal(out, torch.zeros_like(rows))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"alibi_slopes": [0.5] * HEADS}, "ALiBi slopes"),
        ({"kv_cache_dtype": "fp8_per_token_head"}, "a fp8_per_token_head KV cache"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "AttentionType.ENCODER_ONLY attention"),
    ],
)
def test_what_a_layer_cannot_serve_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"does not serve .*{named}.*EAGLE_PLUGIN=0"):
        TreeAttentionImpl(HEADS, DIM, 0.2, KV_HEADS, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reloaded_sinks(dtype: torch.dtype) -> None:
    """vLLM loads weights again into the memory of the old ones, then processes them again."""
    given = torch.nn.Parameter(torch.randn(HEADS).to(dtype), requires_grad=False)
    layer = TreeAttentionImpl(HEADS, DIM, 0.2, KV_HEADS, sinks=given)
    layer.process_weights_after_loading(dtype)
    sinks = layer.sinks
    assert sinks is not None and torch.equal(sinks, given.float())
    address = sinks.data_ptr()
    given.data.copy_(torch.randn(HEADS))
    layer.process_weights_after_loading(dtype)
    assert layer.sinks is sinks and sinks.data_ptr() == address and torch.equal(sinks, given.float())


# ---------------------------------------------------------------------------------------------------------------------
# Prompts as chains, where the kernel attends over trees only


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 20}, {"chunk": 24}, {"window": 90}, {"logit_cap": 5.0}, {"sinks": torch.randn(HEADS)}],
    ids=["plain", "window", "chunk", "window over parts", "capping", "sinks"],
)
def test_chains_attend_as_prompts_do(options: dict[str, Any]) -> None:
    """Beginnings and continuations of prompts, shorter and longer than a chain, beside plain requests."""
    gen = torch.Generator().manual_seed(3)
    lens, prefixes = [1, 5, 64, 65, 150, 1, 2], [0, 40, 0, 17, 30, 63, 0]
    b, n, longest = len(lens), sum(lens), 190
    cache = CacheRows(*(torch.randn(b * longest, KV_HEADS, DIM, generator=gen) for _ in "kv"))
    table = torch.randperm(b * longest, generator=gen).int().view(b, longest)
    query = torch.randn(n, HEADS, DIM, generator=gen)
    counts = torch.tensor(lens)
    extend = ExtendRows(torch.arange(b).flip(0), torch.tensor(prefixes) + counts, counts, counts.cumsum(0) - counts)
    settings = {"scale": 0.2, "logit_cap": 0.0, "window": -1, "chunk": 0, "sinks": None} | options
    wanted = extend_attention(query, *cache, table, *extend, **settings)
    found = torch.full_like(wanted, torch.nan)
    chains = chains_of(extend, lens, table)
    attend_chains(query, cache, chains, settings, found)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    assert [(chain.tree.tail, len(chain.tree.requests)) for chain in chains] == [(1, 2), (8, 2), (64, 6)]
    # The control: the last part of each prompt is not cut at its prefix.
    far = [chain._replace(tree=chain.tree._replace(prefix_lens=chain.tree.prefix_lens * 0)) for chain in chains]
    attend_chains(query, cache, far, settings, found)
    assert not torch.allclose(found, wanted, rtol=0, atol=1e-2)


def tails(lens: list[int], most: int | None = None) -> list[tuple[int, int]]:
    """Rows of the chains of these requests, and their number."""
    counts, table = torch.tensor(lens), torch.zeros(len(lens), 200, dtype=torch.int32)
    extend = ExtendRows(torch.arange(len(lens)), counts, counts, counts.cumsum(0) - counts)
    return [(chain.tree.tail, len(chain.tree.requests)) for chain in chains_of(extend, lens, table, most)]


def test_short_rows_are_padded_to_short_chains() -> None:
    """As the accepted paths that a head reads in a step with a prompt."""
    assert tails([3] * 63) == [(4, 63)]
    assert tails([*[3] * 62, 100]) == [(4, 62), (64, 2)]
    assert tails([*[3] * 62, 100], most=64) == [(4, 62)]
    assert tails([1, 2, 16, 17, 33, 64]) == [(1, 1), (16, 2), (64, 3)] and tails([1, 17, 20]) == [(1, 1), (32, 2)]
    assert tails([]) == []
