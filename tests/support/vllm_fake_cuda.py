"""Batches, caches and models of vLLM on fake CUDA tensors; the forwards of the models compute nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fake_cuda import CUDA, require_cuda
from torch.utils._pytree import tree_leaves
from vllm_sampling_metadata import sampling_metadata

from eagle_plugin.core.shape import Shape
from eagle_plugin.kernels.gated_delta import Net
from eagle_plugin.runtime.accept import KVCaches
from eagle_plugin.runtime.parallel_levels import Block, HeadLevels
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.vllm import linear_attention
from eagle_plugin.vllm.attention import TreeAttentionImpl
from eagle_plugin.vllm.batch import DraftStore, RoundBatch
from eagle_plugin.vllm.block_drafts import BlockForwards
from eagle_plugin.vllm.cache_layout import slot_table
from eagle_plugin.vllm.drafter import TreeProposer
from eagle_plugin.vllm.masked_rows import HeadRows

B, VOCABULARY, DRAFT_VOCABULARY, HIDDEN, BLOCK = 3, 512, 256, 64, 16
SHAPE = Shape(3, 4, 16)
NAMES = ["a", "b", "c"]
# What the scheduler puts together: drafted tokens and query rows of each request.
BATCHES = {
    "trees alone": ([15, 15, 15], [16, 16, 16]),
    "a tree cut short": ([15, 7, 15], [16, 8, 16]),
    "a tree beside a prompt and a plain request": ([15, 0, 0], [16, 40, 1]),
    "no tree": ([0, 0, 0], [1, 1, 1]),
}


def read(counts: list[int], lens: list[int], shape: Shape = SHAPE) -> RoundBatch:
    store = DraftStore()
    drafts = Drafts.plain(torch.zeros(B, dtype=torch.int64, device=CUDA), shape.width)
    store.put(NAMES, drafts._replace(shape=shape))
    prefixes = torch.full((B,), 9, device=CUDA)
    return RoundBatch.read(np.array(counts), np.array(lens), NAMES, prefixes, store)


def metadata(greedy: bool) -> SimpleNamespace:
    ones = torch.ones(B, device=CUDA)
    return sampling_metadata() if greedy else sampling_metadata(ones, ones.int() * 7, ones)


def table() -> torch.Tensor:
    return slot_table(torch.zeros(B, 8, dtype=torch.int32, device=CUDA), BLOCK, 100)


def caches() -> KVCaches:
    zeros = torch.zeros(4, dtype=torch.int64, device=CUDA)
    return KVCaches(zeros, zeros, 100)


class Head(TreeProposer):
    """The drafter, with a head whose forward checks what it is given and computes nothing."""

    max_num_tokens = 1000

    def __init__(self, mapped: bool = True) -> None:
        self._draft_to_target = torch.arange(DRAFT_VOCABULARY, device=CUDA) if mapped else None
        self.method = "eagle3"
        self.model = SimpleNamespace(combine_hidden_states=lambda x: x[:, :HIDDEN])  # type: ignore[assignment]

    def _one_forward(self, rows: HeadRows) -> Any:
        tokens, positions, hidden, metadata = rows
        given = tree_leaves((tokens, positions, hidden, metadata.rows, metadata.slot_table, metadata.slots))
        for tensor in given:
            if isinstance(tensor, torch.Tensor):
                require_cuda("what the head reads", tensor)
        assert len(tokens) == len(positions) == len(hidden) == len(metadata.slots)
        return (torch.zeros(len(tokens), HIDDEN, device=CUDA),) * 2

    def _logits(self, normed: Any) -> Any:
        return torch.zeros(len(normed), DRAFT_VOCABULARY, device=CUDA)


class BlockHead(BlockForwards, Head):
    """The same for a block drafter; its keys and values of accepted tokens are only looked at."""

    def __init__(self) -> None:
        Head.__init__(self)
        block = Block(7, SHAPE.width)
        self.levels, self.block_rows = HeadLevels(block=block), block.rows
        zeros = torch.zeros(VOCABULARY, 4, device=CUDA)
        self.model.markov_embed = lambda tokens: zeros[tokens]
        self.model.markov_bias = lambda embedded: embedded @ zeros[:DRAFT_VOCABULARY].T
        self.model.precompute_and_store_context_kv = self._check_context

    def with_markov(self) -> BlockHead:
        """The same with a Markov head, sampling from its anchor."""
        self.levels = HeadLevels(block=Block(7, SHAPE.width - 1, first=0), after=self._logits_after)
        return self

    def _check_context(self, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        for tensor in (states, positions, slots):
            require_cuda("a context state", tensor)
        assert len(states) == len(positions) == len(slots)

    def _one_forward(self, rows: HeadRows) -> Any:
        return Head._one_forward(self, rows)


def linear_layer(name: str) -> Any:
    """A gated delta net whose cache is 8 slots."""
    keys, values, dim, taps = 2, 4, 16, 4
    channels = (2 * keys + values) * dim
    heads, weight = torch.zeros(values, device=CUDA), torch.zeros(channels, taps, device=CUDA)
    states = torch.zeros(8, values, dim, dim, device=CUDA)
    return SimpleNamespace(
        prefix=name,
        conv_kernel_size=taps,
        conv1d=SimpleNamespace(),
        kv_cache=(torch.zeros(8, taps - 1, channels, device=CUDA), states),
        tree_net=Net(keys, values, dim, dim, weight, None, heads, heads),
        model_config=SimpleNamespace(dtype=torch.float32),
    )


def run_linear_layer(monkeypatch: Any, layer: Any, metadata: Any, n: int) -> None:
    """The layer's operator over n rows, in vLLM's context of a forward."""
    context = SimpleNamespace(attn_metadata={layer.prefix: metadata}, no_compile_layers={layer.prefix: layer})
    monkeypatch.setattr(linear_attention, "get_forward_context", lambda: context)
    net = layer.tree_net
    gates = torch.zeros(n, net.value_heads, device=CUDA)
    out = torch.zeros(n, net.value_heads, net.value_dim, device=CUDA)
    rows = torch.zeros(n, len(net.weight), device=CUDA)
    linear_attention.gated_delta_trees(rows, gates, gates, out, layer.prefix)


def attention_layer(**options: Any) -> TreeAttentionImpl:
    """A layer whose cache is 100 rows; options: of its class."""
    layer = TreeAttentionImpl(4, 64, 0.1, 2, **options)
    rows: Any = (torch.zeros(100, 2, 64, device=CUDA).to(layer.float8 or torch.float32),) * 2
    layer.rows_of = lambda _: rows  # type: ignore[method-assign]
    return layer
