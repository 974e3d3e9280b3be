"""Serves forwards over trees with our attention, and all others with the backend that the user chose."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from eagle_plugin.kernels.attention import tree_attention
from eagle_plugin.kernels.float8 import FLOAT8
from eagle_plugin.kernels.kv import store_kv
from eagle_plugin.runtime.round import TreeRows
from eagle_plugin.sglang.linear_attention import linear_attention
from eagle_plugin.sglang.releases import metrics_read_lengths


def tree_rows_of(forward_batch: Any) -> TreeRows | None:
    """The rows of a forward over draft trees, None for any other SGLang ``ForwardBatch``.

    A spec input that has them has ``slot_table`` too: [B, C] int32, the cache slots that the rows' requests name. Where
    layers with a sliding window have a pool of their own, ``sliding_rows`` has the same of that pool; where layers keep
    a state in place of keys, ``linear_trees`` has what these need.
    """
    return getattr(forward_batch.spec_info, "tree_rows", None)


def scales_of(layer: Any, cache: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of the keys and the values of an SGLang layer, [1] float32; None where there is none, which is 1.

    cache: its keys; only one of 8-bit floats has scales. A layer has them of its checkpoint as parameters, or of a file
    that ``load_kv_cache_scales`` has read as numbers.
    """
    if cache.dtype not in FLOAT8 or layer.k_scale is None or layer.v_scale is None:
        return None, None
    keys, values = (
        x.detach().view(1) if isinstance(x, torch.Tensor) else torch.full((1,), x, device=cache.device)
        for x in (layer.k_scale, layer.v_scale)
    )
    return keys, values


class LayerCache(NamedTuple):
    """The cache of an SGLang layer."""

    keys: torch.Tensor  # [slots, Hkv, D]
    values: torch.Tensor
    k_scale: torch.Tensor | None  # as of `scales_of`
    v_scale: torch.Tensor | None

    @classmethod
    def of(cls, layer: Any, pool: Any) -> LayerCache:
        """The layer's in a pool of the engine."""
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        return cls(keys, values, *scales_of(layer, keys))


def write_kv(cache: LayerCache, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store keys and values [N, Hkv, D] in these slots [N] int64."""
    # Divided in the model's dtype, as in the engine's own ``set_kv_buffer``; its rounding is part of the cache.
    k, v = (x if by is None else x / by[0] for x, by in ((k, cache.k_scale), (v, cache.v_scale)))
    store_kv(cache.keys, cache.values, slots, k, v)


class TreeAttention:
    """Proxy of an SGLang attention backend that serves forwards over draft trees itself.

    A forward batch says itself what it is: one over trees has ``tree_rows`` in its ``spec_info``. Nothing is remembered
    between forwards. Everything that is not a tree forward, and every attribute that the engine reads or sets, goes to
    the wrapped backend. It is a proxy and no ``AttentionBackend`` subclass because that class has a default for almost
    every member, so a subclass would silently answer for the wrapped backend.
    """

    def __init__(self, base: Any, sliding: Collection[int] = (), chunk: int = 0) -> None:
        """sliding: the layers whose keys are in a pool of sliding windows; chunk: as of `pools.chunk_of`."""
        object.__setattr__(self, "_base", base)
        object.__setattr__(self, "_chunk", chunk)
        object.__setattr__(self, "_sliding", frozenset(sliding))

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        """As the wrapped backend's: models ask by `isinstance` whether theirs can mask pictures (Gemma 3)."""
        return type(self._base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._base, name, value)

    @property
    def needs_cpu_seq_lens(self) -> bool:
        """Decode rounds read lengths on the device only: the scheduler need not bring them to the host for us."""
        return metrics_read_lengths()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a forward; one over trees needs no plan."""
        if tree_rows_of(forward_batch) is None:
            self._base.init_forward_metadata(forward_batch)

    def forward(
        self,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        layer: Any = None,
        forward_batch: Any = None,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> torch.Tensor:
        """Attention of one layer; q [N, Hq * D], k and v [N, Hkv, D] -> [N, Hq * D].

        A layer that keeps a state gives ``mixed_qkv``, ``a`` and ``b`` in place of q, k and v (`linear_attention`).
        """
        rows = tree_rows_of(forward_batch)
        if rows is None:
            if sinks is not None:
                unknown["sinks"] = sinks
            return self._base.forward(q, k, v, layer, forward_batch, save_kv_cache, **unknown)
        if unknown.keys() == {"mixed_qkv", "a", "b"}:
            trees = forward_batch.spec_info.linear_trees
            return linear_attention(self._base.req_to_token_pool, layer, trees, **unknown)
        assert q is not None
        if unknown:
            raise ValueError(
                f"tree attention was given {', '.join(unknown)}, which it does not know: "
                "start the server with EAGLE_PLUGIN=0 for this model"
            )
        cache = LayerCache.of(layer, self._base.token_to_kv_pool)
        info, slots = forward_batch.spec_info, forward_batch.out_cache_loc
        table, prefix_lens = info.slot_table, rows.prefix_lens
        if layer.layer_id in self._sliding:
            prefix_lens, table, slots = info.sliding_rows
            slots = slots[:, : rows.tail].contiguous().view(-1)
        # A layer that shares the keys of an earlier one gives none: that layer has stored them in the same forward.
        if save_kv_cache and k is not None and v is not None:
            write_kv(cache, slots, k, v)
        out = tree_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            cache.keys,
            cache.values,
            table,
            rows.requests,
            prefix_lens,
            rows.ancestors,
            tail=rows.tail,
            scale=layer.scaling,
            logit_cap=layer.logit_cap,
            window=layer.sliding_window_size,
            chunk=self._chunk if layer.use_irope else 0,
            sinks=None if sinks is None else sinks.float(),
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)
