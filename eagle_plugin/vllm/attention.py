"""Attention in vLLM that also attends over draft trees, by our kernels.

It replaces the platform's as a whole: CPU_ATTN packs keys in a layout of its own for each instruction set, which tree
attention and the move of accepted keys would have to know. Ours keeps them token by token, on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, AttentionType

from eagle_plugin.core.shape import MAX_WIDTH
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.kernels.attention import extend_attention, tree_attention
from eagle_plugin.kernels.kv import store_kv
from eagle_plugin.runtime.host_to_device import to_device
from eagle_plugin.runtime.round import TreeRows
from eagle_plugin.vllm.cache_dtypes import FLOAT8
from eagle_plugin.vllm.cache_layout import CacheRows, cache_rows, slot_table

SHORT = 16  # rows of a request that are padded apart from those of longer ones


class ExtendRows(NamedTuple):
    """The requests of a forward whose query rows are consecutive positions: prefills, and decodes without drafts."""

    requests: Tensor  # [e] int64: row of the slot table
    seq_lens: Tensor  # [e] int64: tokens after this forward
    lens: Tensor  # [e] int64: query rows
    starts: Tensor  # [e] int64: first query row


class Rows(NamedTuple):
    """How the query rows of a forward attend, whatever the cache group."""

    extend: ExtendRows | None
    tree: TreeRows | None
    # [t * W] int64: query row of each node of the trees; None: the nodes are all the query rows, in order. Nodes that
    # share a row must have equal ancestors: one of them decides what the row gets.
    query: Tensor | None = None
    extend_lens: Sequence[int] = ()  # extend.lens, on the host


class Chains(NamedTuple):
    """Consecutive positions as chains of draft nodes, for devices whose kernel attends over trees only."""

    tree: TreeRows  # c chains of R nodes: parts of prompts, or tokens of plain decoding
    query: Tensor  # [c * R] int64: query row of each node; padding has that of the chain's last node
    slot_table: Tensor  # [b, S + R] int32


@dataclass
class TreeMetadata:
    """What the attention layers of one cache group need in one forward."""

    rows: Rows
    slot_table: Tensor  # [b, S] int32: row of the cache of each position
    slots: Tensor  # [N] int64: row of the cache for the key of each query row
    _plans: dict[Any, Any] = field(default_factory=dict)

    def planned(self, name: Any, plan: Callable[[], Any]) -> Any:
        """What `plan` gives, once for all layers."""
        if name not in self._plans:
            self._plans[name] = plan()
        return self._plans[name]

    def chains(self, most: int | None = None) -> list[Chains]:
        """The rows of `rows.extend`, but for requests with more than `most` rows."""
        extend, lens = self.rows.extend, self.rows.extend_lens
        assert extend is not None
        found: list[Chains] = self.planned(("chains", most), lambda: chains_of(extend, lens, self.slot_table, most))
        return found


def chains_of(extend: ExtendRows, lens: Sequence[int], slot_table: Tensor, most: int | None = None) -> list[Chains]:
    """Cut the rows of a step into chains: one node for each plain request, and up to 64 for each part of a prompt.

    Chains are padded to a power of two that the longest of them has room in: few lengths, few kernels. Short ones, such
    as the accepted paths that a head reads, are apart: beside a prompt they would be as long as its parts.

    lens: extend.lens, on the host. most: requests with more rows are left out.
    """
    device, found = slot_table.device, []
    kinds: tuple[list[tuple[int, int]], ...] = ([], [], [])  # request and first row of each chain
    for i, n in enumerate(lens):
        if most is None or n <= most:
            kinds[(n > 1) + (n > SHORT)].extend((i, begin) for begin in range(0, n, MAX_WIDTH))
    for chains in filter(None, kinds):
        owners, begins = np.array(chains).T
        last = np.minimum(np.array(lens)[owners] - begins, MAX_WIDTH) - 1
        length = 1 << int(last.max()).bit_length()
        nodes = np.minimum(np.arange(length), last[:, None])
        owner, begin, node = to_device([owners, begins, nodes], device)
        prefix_lens = (extend.seq_lens - extend.lens)[owner] + begin
        query = ((extend.starts[owner] + begin)[:, None] + node).view(-1)
        rows = TreeRows(extend.requests[owner], prefix_lens, chain_ancestors(length, device)[node], length)
        found.append(Chains(rows, query, pad(slot_table, (0, length))))
    return found


def attend_chains(query: Tensor, cache: CacheRows, chains: list[Chains], options: dict[str, Any], out: Tensor) -> None:
    """`extend_attention` by `tree_attention`: query and out [N, Hq, D]; out gets the rows of the chains."""
    for tree, rows, table in chains:
        visible = (table, tree.requests, tree.prefix_lens, tree.ancestors)
        out[rows] = tree_attention(query[rows], *cache, *visible, tail=tree.tail, **options)


def attend_extend(
    query: Tensor, cache: CacheRows, metadata: TreeMetadata, options: dict[str, Any], out: Tensor
) -> None:
    """Attend from the rows of `metadata.rows.extend`; query [N, Hq, D], out [N, Hq, Dv]; options: of the kernels."""
    extend = metadata.rows.extend
    assert extend is not None
    if query.is_cpu:
        rows = (extend.requests, extend.seq_lens, extend.lens, extend.starts)
        extend_attention(query, *cache, metadata.slot_table, *rows, out=out, **options)
    else:
        attend_chains(query, cache, metadata.chains(), options, out)


def attend_trees(query: Tensor, cache: CacheRows, metadata: TreeMetadata, options: dict[str, Any], out: Tensor) -> None:
    """Attend from the nodes of `metadata.rows.tree`, as `attend_extend` does from the other rows."""
    tree, rows = metadata.rows.tree, metadata.rows.query
    assert tree is not None
    visible = (metadata.slot_table, tree.requests, tree.prefix_lens, tree.ancestors)
    if rows is None:
        tree_attention(query, *cache, *visible, tail=tree.tail, out=out, **options)
    else:
        out[rows] = tree_attention(query[rows], *cache, *visible, tail=tree.tail, **options)


class TreeMetadataBuilder(AttentionMetadataBuilder[TreeMetadata]):
    """Builds the metadata of one cache group; the runner says beforehand which rows are tree nodes."""

    kind: type[TreeMetadata] = TreeMetadata
    pads = False  # whether the engine gives rows without a slot -1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size: int = kv_cache_spec.block_size
        self.reach: int = vllm_config.num_lookahead_tokens + 1  # draft slots after the longest sequence
        self.rows: Rows | None = None
        # By the engine's metadata, of which each group of caches has one: the same places for all its builders.
        self.places: dict[tuple[int, int], tuple[Any, Tensor, Tensor]] = {}

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TreeMetadata:
        """Metadata for the batch at hand; vLLM's ``CommonAttentionMetadata`` holds b requests."""
        common = common_attn_metadata
        if self.rows is None:
            return self.kind(causal_rows(common), *self._places(common))
        key = id(common), self.block_size
        if key not in self.places:
            self.places[key] = common, *self._places(common)  # with it: no other one gets its id
        return self.kind(self.rows, *self.places[key][1:])

    def _places(self, common: Any) -> tuple[Tensor, Tensor]:
        """The slot table and the slots of the query rows."""
        slots = common.slot_mapping.clamp(min=0) if self.pads else common.slot_mapping  # 0: of the block of nobody
        return slot_table(common.block_table_tensor, self.block_size, common.max_seq_len + self.reach), slots


def give_rows(builders: Iterable[Any], rows: Rows | None) -> None:
    """Say to the builders of a forward how its query rows attend; None: as the engine has prepared them."""
    places: dict[tuple[int, int], tuple[Any, Tensor, Tensor]] = {}
    for builder in builders:
        builder.rows, builder.places = rows, places


def causal_rows(common: Any) -> Rows:
    """Rows of a batch without trees, of vLLM's ``CommonAttentionMetadata``."""
    bounds, seq_lens = common.query_start_loc.long(), common.seq_lens.long()
    requests = torch.arange(len(seq_lens), device=bounds.device)
    extend = ExtendRows(requests, seq_lens, bounds.diff(), bounds[:-1])
    return Rows(extend, None, extend_lens=common.query_start_loc_cpu.diff().tolist())


class TreeAttentionImpl(AttentionImpl):
    """Attention of one layer; the constructor is the one that vLLM calls for every backend."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        unserved = {
            "ALiBi slopes": alibi_slopes is not None,
            f"a {kv_cache_dtype} KV cache": kv_cache_dtype not in ("auto", "bfloat16", "float16", *FLOAT8),
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
        }
        if found := [what for what, holds in unserved.items() if holds]:
            raise ValueError(
                f"eagle-plugin does not serve {', '.join(found)}: start the server with EAGLE_PLUGIN=0 for this model"
            )
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.float8 = FLOAT8.get(kv_cache_dtype)  # what the cache holds; None: the dtype of the keys
        self.sliding_window = -1 if sliding_window is None else sliding_window - 1  # keys before the query
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.sinks = self._given_sinks = sinks  # the latter: what the engine reloads in place
        self.stores = kv_sharing_target_layer_name is None  # else an earlier layer has, into the cache that both have
        self._cache: tuple[int, CacheRows] | None = None
        # Its longest context may be made shorter, to what the caches have room for. None: built without an engine.
        self._model_config = getattr(get_current_vllm_config_or_none(), "model_config", None)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: TreeMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store the new keys, then attend; query and output [N, Hq, D], key and value [N, Hkv, D].

        Rows after those that have slots are padding to the size of a CUDA graph: nobody reads what they get.
        """
        if attn_metadata is None:  # vLLM warms up without a cache; fresh memory may hold NaN, which routes no experts
            return output.zero_()
        n = len(attn_metadata.slots)
        padded, output = output, output[:n]
        query, cache = query[:n], self.rows_of(kv_cache)
        if self.stores and key is not None and value is not None:
            store_kv(*cache, attn_metadata.slots, key[:n], value[:n], **self._scales(layer))
        options = self.options(layer, query.device)
        if attn_metadata.rows.extend is not None:
            self.extend(query, kv_cache, cache, attn_metadata, options, output)
        if attn_metadata.rows.tree is not None:
            attend_trees(query, cache, attn_metadata, options, output)
        return padded

    def options(self, layer: Any, device: torch.device) -> dict[str, Any]:
        """What the kernels want to know of the layer that has this attention."""
        config = None if device.type == "cpu" else self._model_config
        return {
            "scale": self.scale,
            "logit_cap": self.logits_soft_cap,
            "window": self.sliding_window,
            "chunk": getattr(layer, "attention_chunk_size", 0),  # of vLLM's ChunkedLocalAttention alone
            "sinks": self.sinks,
            **self._scales(layer),
            **({} if config is None else {"most_keys": config.max_model_len}),
        }

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Store keys and values [N, Hkv, D] that are computed outside of a forward, as those of a block drafter are."""
        store_kv(*self.rows_of(kv_cache), slots, key, value, **self._scales(layer))

    def extend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        cache: CacheRows,
        metadata: TreeMetadata,
        options: dict[str, Any],
        out: Tensor,
    ) -> None:
        """`attend_extend`; cache: kv_cache as rows."""
        attend_extend(query, cache, metadata, options, out)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks enter the kernels as float32 logits: after a reload at the same address, which captured steps read."""
        if self.sinks is None or self._given_sinks is None:
            return
        if self.sinks is self._given_sinks:
            self.sinks = self._given_sinks.detach().float()
        else:
            self.sinks.copy_(self._given_sinks.detach())

    def _scales(self, layer: Any) -> dict[str, Tensor]:
        """Of a float8 cache: buffers of the layer, which the engine fills from the checkpoint, or with 1."""
        return {} if self.float8 is None else {"k_scale": layer._k_scale.view(1), "v_scale": layer._v_scale.view(1)}

    def forget_cache(self) -> None:
        """Hold no view of a cache that the engine has given up."""
        self._cache = None

    def rows_of(self, kv_cache: Tensor) -> CacheRows:
        """The layer's cache as rows of one token each."""
        address = kv_cache.data_ptr()
        if self._cache is None or self._cache[0] != address:
            self._cache = address, cache_rows(kv_cache if self.float8 is None else kv_cache.view(self.float8))
        return self._cache[1]
