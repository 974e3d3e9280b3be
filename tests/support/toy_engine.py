"""Our drafter and verifier for SGLang on two small models, without an engine: each has one layer of real tree attention
over a paged cache, and random weights."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from torch import Tensor

from eagle_plugin.core.shape import MAX_WIDTH, Shape
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.kernels.attention import tree_attention
from eagle_plugin.kernels.kv import store_kv
from eagle_plugin.runtime.parallel_levels import HeadLevels, MaskRow
from eagle_plugin.sglang.batch import RoundBatch
from eagle_plugin.sglang.drafter import TreeDrafter, TreeExtendInput, no_tokens
from eagle_plugin.sglang.verifier import TreeVerifier

V, DRAFT_V, H, D, ROWS, COLUMNS = 256, 128, 32, 16, 12, 64
SHAPE = Shape(3, 4, 16)


class ToyModel:
    """One layer of attention over its own paged cache, with random weights."""

    def __init__(self, vocabulary: int, features: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.keys, self.values = (torch.randn(ROWS * COLUMNS, 2, D, generator=g) for _ in range(2))
        self.embed, self.qkv = torch.randn(V, H, generator=g), torch.randn(H, 8 * D, generator=g) / 6
        self.out, self.head = torch.randn(4 * D, H, generator=g) / 8, torch.randn(H, vocabulary, generator=g)
        self.features = torch.randn(H, features, generator=g)

    def keep_in(self, pool: Any) -> None:
        """Keep keys and values in the first layer of a pool of the engine."""
        self.keys, self.values = pool.get_key_buffer(0), pool.get_value_buffer(0)

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor, info: Any) -> tuple[Tensor, Tensor]:
        x = self.embed[tokens] + positions[:, None] * 0.01
        if isinstance(getattr(info, "hidden_states", None), Tensor):
            x = x + info.hidden_states[:, :H]
        q, k, v = (x @ self.qkv).split([4 * D, 2 * D, 2 * D], dim=1)
        store_kv(self.keys, self.values, slots, k.view(-1, 2, D), v.view(-1, 2, D))
        rows = info.tree_rows
        out = tree_attention(
            q.view(-1, 4, D), self.keys, self.values, info.slot_table, rows.requests, rows.prefix_lens, rows.ancestors,
            tail=rows.tail, scale=0.25,
        )  # fmt: skip
        y = x + out.view(-1, 4 * D) @ self.out
        if isinstance(info, TreeExtendInput):
            y = y[info.select_index]
        return y @ self.head, y @ self.features


class Drafter(TreeDrafter):
    def __init__(self) -> None:
        self.topk, self._most_children = DRAFT_V, SHAPE.topk
        self.hot_token_id = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:DRAFT_V]
        self._chain, self._contexts = chain_ancestors(MAX_WIDTH, "cpu"), contextlib.nullcontext
        self._nothing = no_tokens(DRAFT_V, "cpu")
        self.model = ToyModel(DRAFT_V, H, 1)

    def _forward(self, batch: RoundBatch, *, tokens: Any, positions: Any, slots: Any, info: Any, **_: Any) -> Any:
        logits, hidden = self.model(tokens, positions, slots, info)
        return SimpleNamespace(next_token_logits=logits, hidden_states=hidden)


class ParallelDrafter(Drafter):
    """The head drafts all levels in one forward over masked rows."""

    levels = HeadLevels(MaskRow(7, torch.randn(1, H, generator=torch.Generator().manual_seed(8))))


class Verifier(TreeVerifier):
    def __init__(self, engines_pool: Any = None) -> None:
        """engines_pool: of the engine, in place of the model's own memory."""
        self.model = ToyModel(V, 3 * H, 2)
        if engines_pool is not None:
            self.model.keep_in(engines_pool)
        caches = (self.model.keys, self.model.values)
        pool = SimpleNamespace(
            data_ptrs=torch.tensor([cache.data_ptr() for cache in caches]),
            data_strides=torch.tensor([cache.stride(0) * 4 for cache in caches]),
            size=ROWS * COLUMNS,
            page_size=0,
        )
        config = SimpleNamespace(vocab_size=V, model_is_mrope=False)
        runner = SimpleNamespace(model_config=config, device="cpu", model=torch.nn.Module())
        super().__init__(
            SimpleNamespace(model_runner=runner), None, ROWS, SimpleNamespace(get_kvcache=lambda: engines_pool or pool)
        )
        self._forward = self._target

    def _target(self, batch: RoundBatch, *, tokens: Any, positions: Any, slots: Any, info: Any, **_: Any) -> Any:
        logits, features = self.model(tokens, positions, slots, info)
        return LogitsProcessorOutput(next_token_logits=logits, hidden_states=features)


# Row 0 and slot 0 are the engine's padding.
TABLE = torch.randperm(ROWS * COLUMNS - 1, generator=torch.Generator().manual_seed(5)).add(1)
TABLE = torch.cat([TABLE, TABLE[:1]]).view(ROWS, COLUMNS).int()
TABLE[0] = 0
