"""Gated-delta-net layers (Qwen3-Next, Qwen3.5) in vLLM: one state per request, and draft trees that start from it.

vLLM's own layers keep a state after every drafted token and compute in bfloat16 on CPUs. Ours keep the state before the
tree: after the walk the accepted path is added to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MethodType
from typing import Any, NamedTuple

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
from eagle_plugin.kernels.gated_delta import Caches, Left, Net, Places, Projections, TreePlan, plan
from eagle_plugin.kernels.gated_delta_trees import attend_trees, commit_trees, room_for
from eagle_plugin.runtime.host_to_device import to_device
from eagle_plugin.vllm.attention import Rows, causal_rows


class Trees(NamedTuple):
    """The trees of a forward, or consecutive positions of equally many rows each as trees of one path."""

    places: Places
    plan: TreePlan
    query: Tensor | None  # [t * W] int64: query row of each node; None: the first query rows, in order
    last: Tensor | None = None  # [t] int64: the last row of each path; of trees the walk says it


@dataclass
class LinearMetadata:
    """What the layers of one cache group need in one forward, and what each leaves of its trees."""

    rows: Rows
    slots: Tensor  # [b] int64: where the state of each request is
    left: dict[str, Left] = field(default_factory=dict)  # by the name of the layer
    rooms: Mapping[str, Left] = field(default_factory=dict)  # the same: where it is to lie, if not anywhere
    _trees: Trees | None = None
    _paths: list[Trees] | None = None

    def trees(self, taps: int) -> Trees:
        """The trees of `rows`, planned once for all layers."""
        if self._trees is None:
            tree = self.rows.tree
            assert tree is not None
            places = self._places(tree.requests, tree.prefix_lens)
            self._trees = Trees(places, plan(tree.ancestors, taps), self.rows.query)
        return self._trees

    def paths(self, taps: int) -> list[Trees]:
        """The other rows, planned once: requests with equally many together, in parts as long as a tree can be wide."""
        if self._paths is None:
            self._paths = self._plan_paths(taps)
        return self._paths

    def _plan_paths(self, taps: int) -> list[Trees]:
        extend, found, alike = self.rows.extend, [], defaultdict[int, list[int]](list)
        assert extend is not None
        for i, length in enumerate(self.rows.extend_lens):
            alike[length].append(i)
        device = self.slots.device
        for length, members in alike.items():
            (which,) = to_device([np.array(members)], device)
            rows = extend.starts[which][:, None] + torch.arange(length, device=device)
            before = extend.seq_lens[which] - length
            for begin in range(0, length, MAX_WIDTH):
                part = rows[:, begin : begin + MAX_WIDTH]
                places = self._places(extend.requests[which], before + begin)
                last = torch.full_like(which, part.shape[1] - 1)
                chain = _chain(len(members), part.shape[1], taps, device)
                found.append(Trees(places, chain, part.reshape(-1), last))
        return found

    def _places(self, requests: Tensor, lengths: Tensor) -> Places:
        """Slot 0 is in the block that vLLM gives to nobody: what other layers write there is no state."""
        slots = self.slots[requests]
        return Places(slots, torch.where(slots > 0, lengths, 0))


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
            places, planned, *_ = metadata.trees(layer.conv_kernel_size)
            left = metadata.left.pop(layer.prefix)
            commit_trees(_net(layer), _caches(layer), places, left, planned, nodes[tree.requests])

    def caches(self) -> dict[str, Caches]:
        """What the engine keeps of each layer, by its name."""
        return {layer.prefix: _caches(layer) for layer in self._layers}

    def rooms(self, rows: int) -> dict[str, Left]:
        """Memory for what so many nodes leave in each layer, by its name."""
        return {layer.prefix: room_for(rows, layer.tree_net, layer.model_config.dtype) for layer in self._layers}


def _unpacked(layer: Any) -> Tensor | None:
    """The weight [C, w] of the convolution where vLLM packs it, which some CPUs want; a reload makes it anew."""
    return getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)


def _net(layer: Any) -> Net:
    """The sizes and weights of a layer; what the engine does not pack is reloaded in place."""
    net: Net = layer.tree_net
    unpacked = _unpacked(layer)
    if unpacked is not None and unpacked is not net.weight:
        net = layer.tree_net = net._replace(weight=unpacked)
    return net


def _serve(layer: QwenGatedDeltaNetAttention) -> None:
    """Let a layer compute by `gated_delta_trees`, and keep one state per request."""
    unpacked = _unpacked(layer)
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
        b, a = layer.split_ba(gate)
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
    nodes, taps = Projections(mixed_qkv, a, b), layer.conv_kernel_size
    if metadata.rows.extend is not None:
        for path in metadata.paths(taps):
            left = _attend(layer, nodes, path, out)
            assert path.last is not None
            commit_trees(_net(layer), _caches(layer), path.places, left, path.plan, path.last)
    if metadata.rows.tree is not None:
        room = metadata.rooms.get(layer.prefix)
        metadata.left[layer.prefix] = _attend(layer, nodes, metadata.trees(taps), out, room)


def _attend(layer: Any, nodes: Projections, trees: Trees, out: Tensor, room: Left | None = None) -> Left:
    """A layer over these trees; nodes and out [N, ...] are of all query rows."""
    places, planned, query, last = trees
    t, width, _ = planned.seen.shape
    net, caches = _net(layer), _caches(layer)
    if query is None:
        nodes = Projections(*(x[: t * width] for x in nodes))
        return attend_trees(net, nodes, caches, places, planned, out[: t * width], room)
    found = out.new_empty(t * width, *out.shape[1:])
    left = attend_trees(net, Projections(*(x[query] for x in nodes)), caches, places, planned, found, room)
    if last is None:  # padding has the row of its tree's last node, and gets what that node gets
        rows = query.view(t, width)
        first = torch.arange(0, t * width, width, device=out.device)[:, None]
        found = found[(first + rows - rows[:, :1]).view(-1)]
    out[query] = found
    return left


@lru_cache(maxsize=64)
def _chain(t: int, length: int, taps: int, device: torch.device) -> TreePlan:
    return plan(chain_ancestors(length, device).repeat(t, 1), taps)


def _caches(layer: Any) -> Caches:
    pasts, states = layer.kv_cache
    return Caches(pasts if is_conv_state_dim_first() else pasts.transpose(1, 2), states)


_library = torch.library.Library("eagle_plugin", "FRAGMENT")
direct_register_custom_op(
    "gated_delta_trees", gated_delta_trees, ["out"], fake_impl=lambda *_: None, target_lib=_library
)
