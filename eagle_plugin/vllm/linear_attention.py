"""Gated-delta-net layers (Qwen3-Next, Qwen3.5) in vLLM: one state per request, and draft trees that start from it.

vLLM's own layers keep a state after every drafted token and compute in bfloat16 on CPUs. Ours keep the state before the
tree: after the walk the accepted path is added to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend

from eagle_plugin.core.shape import MAX_WIDTH
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.gated_delta import Left, Net, TreePlan, attend, past_after, plan, state_after
from eagle_plugin.runtime.host_to_device import to_device
from eagle_plugin.runtime.round import TreeRows
from eagle_plugin.vllm.attention import ExtendRows, Rows, causal_rows


@dataclass
class LinearMetadata:
    """What the layers of one cache group need in one forward, and what each leaves of its trees."""

    rows: Rows
    slots: Tensor  # [b] int64: where the state of each request is
    left: dict[str, Left] = field(default_factory=dict)  # by the name of the layer
    _plan: TreePlan | None = None

    def tree_plan(self, tree: TreeRows, taps: int) -> TreePlan:
        """The plan of the trees, which all layers have in common."""
        if self._plan is None:
            self._plan = plan(tree.ancestors, taps)
        return self._plan


class LinearMetadataBuilder(AttentionMetadataBuilder[LinearMetadata]):
    """Builds the metadata of one cache group; the runner says beforehand which rows are tree nodes."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.rows: Rows | None = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> LinearMetadata:
        """Metadata for the batch at hand; vLLM's ``CommonAttentionMetadata`` holds b requests."""
        common = common_attn_metadata
        rows = self.rows if self.rows is not None else causal_rows(common)
        return LinearMetadata(rows, common.block_table_tensor[:, 0].long())


class LinearBackend(GDNAttentionBackend):
    """What vLLM asks where the states are, and how they are described."""

    @staticmethod
    def get_builder_cls() -> type[LinearMetadataBuilder]:  # type: ignore[override]
        """The metadata's builder."""
        return LinearMetadataBuilder


class LinearLayers:
    """The gated-delta-net layers of a target, computed by our kernels."""

    def __init__(self, model: torch.nn.Module) -> None:
        """model: loaded, and without caches yet."""
        self._layers = [layer for layer in model.modules() if isinstance(layer, QwenGatedDeltaNetAttention)]
        self.names = frozenset(layer.prefix for layer in self._layers)
        for layer in self._layers:
            _serve(layer)

    def commit(self, forward: Mapping[str, Any], accepted: Accepted) -> None:
        """Keep the states after the last accepted nodes; forward: the metadata of a forward with trees, by layer."""
        nodes = accepted.last_nodes() if self._layers else None
        for layer in self._layers:
            metadata: LinearMetadata = forward[layer.prefix]
            tree = metadata.rows.tree
            assert tree is not None and nodes is not None
            last = nodes[tree.requests]
            left, planned = metadata.left.pop(layer.prefix), metadata.tree_plan(tree, layer.conv_kernel_size)
            slots = metadata.slots[tree.requests]
            pasts, states = _caches(layer)
            states[slots] = state_after(_before(states, slots, tree.prefix_lens), left, planned, last)
            pasts[slots] = past_after(left, planned, last).to(pasts.dtype)


def _serve(layer: QwenGatedDeltaNetAttention) -> None:
    """Let a layer compute by `gated_delta_trees`, and keep one state per request."""
    unpacked = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)  # vLLM packs the weight on some CPUs
    layer.tree_net = Net(
        key_heads=layer.num_k_heads // layer.tp_size,
        value_heads=layer.num_v_heads // layer.tp_size,
        key_dim=layer.head_k_dim,
        value_dim=layer.head_v_dim,
        weight=layer.conv1d.weight[:, 0] if unpacked is None else unpacked,
        bias=layer.conv1d.bias,
        a_log=layer.A_log,
        dt_bias=layer.dt_bias,
    )
    layer.num_spec = 0  # of the convolution's past as well
    spec_of = layer.get_kv_cache_spec
    layer.get_kv_cache_spec = lambda config: replace(spec_of(config), num_speculative_blocks=0)
    layer.get_attn_backend = lambda: LinearBackend
    layer._forward_method = MethodType(_forward, layer)


def _forward(layer: Any, hidden: Tensor) -> Tensor:
    """The layer over rows hidden [N, H], as the engine computes it around the states."""
    projected, gate = layer.in_proj_qkvz(hidden)[0], layer.in_proj_ba(hidden)[0]
    if layer.gqa_interleaved_layout:  # Qwen3-Next
        query, key, value, z, b, a = layer.fix_query_key_value_ordering(projected, gate)
        mixed_qkv = torch.cat([part.flatten(1) for part in (query, key, value)], -1)
    else:  # Qwen3.5: side by side
        values = layer.value_dim // layer.tp_size
        mixed_qkv, z = projected.split([projected.shape[1] - values, values], dim=-1)
        z = z.reshape(len(z), -1, layer.head_v_dim)
        b, a = gate.chunk(2, dim=-1)
    out = torch.zeros_like(z)
    torch.ops.eagle_plugin.gated_delta_trees(mixed_qkv, a, b, out, _encode_layer_name(layer.prefix))
    return layer._output_projection(out, z)  # type: ignore[no-any-return]


def gated_delta_trees(mixed_qkv: Tensor, a: Tensor, b: Tensor, out: Tensor, layer_name: LayerNameType) -> None:
    """One layer of the forward at hand: mixed_qkv [N, C], a and b [N, HV], out [N, HV, V] is written to.

    Rows of prompts and of plain decoding change the states; trees leave what `LinearLayers.commit` adds to them.
    """
    context = get_forward_context()
    if context.attn_metadata is None:  # vLLM warms up without a cache
        return
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    metadata: LinearMetadata = context.attn_metadata[layer.prefix]
    pasts, states = _caches(layer)
    extend, tree, query, lens = metadata.rows
    if extend is not None:
        _extend(layer.tree_net, extend, lens, metadata.slots, mixed_qkv, a, b, pasts, states, out)
    if tree is not None:
        t, width = tree.ancestors.shape
        nodes = torch.arange(t * width, device=out.device) if query is None else query
        nodes = nodes.view(t, width)
        slots = metadata.slots[tree.requests]
        past, state = (_before(cache, slots, tree.prefix_lens) for cache in (pasts, states))
        planned = metadata.tree_plan(tree, layer.conv_kernel_size)
        found, metadata.left[layer.prefix] = attend(
            layer.tree_net, mixed_qkv[nodes], a[nodes], b[nodes], past, state, planned
        )
        if query is not None:  # padding has the row of its tree's last node, and gets what that node gets
            requests = torch.arange(t, device=out.device)[:, None]
            found = found[requests, nodes - nodes[:, :1]]
        out[nodes] = found


def _extend(
    net: Net,
    extend: ExtendRows,
    lens: Sequence[int],
    slots: Tensor,
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    pasts: Tensor,
    states: Tensor,
    out: Tensor,
) -> None:
    """Consecutive positions: requests with equally many rows together, in chunks as long as a tree can be wide."""
    alike: dict[int, list[int]] = defaultdict(list)
    for i, length in enumerate(lens):
        alike[length].append(i)
    for length, members in alike.items():
        (which,) = to_device([np.array(members)], out.device)
        own = slots[extend.requests[which]]
        before = extend.seq_lens[which] - length
        past, state = (_before(cache, own, before) for cache in (pasts, states))
        places = extend.starts[which][:, None] + torch.arange(length, device=out.device)
        for part in places.split(MAX_WIDTH, 1):
            chain = _chain(len(members), part.shape[1], net.weight.shape[1], out.device)
            out[part], left = attend(net, mixed_qkv[part], a[part], b[part], past, state, chain)
            last = torch.full_like(which, part.shape[1] - 1)
            state, past = state_after(state, left, chain, last), past_after(left, chain, last).to(past.dtype)
        pasts[own], states[own] = past, state


@lru_cache(maxsize=64)
def _chain(t: int, length: int, taps: int, device: torch.device) -> TreePlan:
    return plan(chain_ancestors(length, device).repeat(t, 1), taps)


def _caches(layer: Any) -> tuple[Tensor, Tensor]:
    """What the convolution reads next [slots, C, w - 1], and the states [slots, HV, V, K]."""
    pasts, states = layer.kv_cache
    return pasts if is_conv_state_dim_first() else pasts.transpose(1, 2), states


def _before(cache: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
    """The entries of requests that have `lengths` tokens; a new request has none, whatever its slot was used for."""
    entries = cache[slots]
    return torch.where((lengths > 0).view(-1, *[1] * (entries.dim() - 1)), entries, torch.zeros_like(entries))


_library = torch.library.Library("eagle_plugin", "FRAGMENT")
direct_register_custom_op(
    "gated_delta_trees", gated_delta_trees, ["out"], fake_impl=lambda *_: None, target_lib=_library
)
