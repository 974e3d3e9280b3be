"""Gated-delta-net layers (Qwen3-Next) in forwards over trees: from the engine's pool of states, and back into it."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from torch import Tensor

from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.gated_delta import Caches, Left, Net, Places, Projections, TreePlan, plan
from eagle_plugin.kernels.gated_delta_trees import attend_trees, commit_trees


class LinearTrees(NamedTuple):
    """One forward over the trees of a padded batch of B: what its layers share, and what each of them leaves."""

    slots: Tensor  # [B] int64: where the engine keeps the states of the requests; 0 of padding
    tree: TreePlan
    left: dict[int, Left]  # by layer; of the last forward, so that a captured one finds it in the graph's memory


class LinearLayers:
    """The layers of one target that keep a state in place of keys and values."""

    def __init__(self, request_pool: Any, layers: list[RadixLinearAttention]) -> None:
        """request_pool: the engine's ``HybridReqToTokenPool``."""
        self._pool, self._layers = request_pool, layers
        self._taps = layers[0].conv_weights.shape[1]

    def begin(self, requests: Tensor, ancestors: Tensor) -> LinearTrees:
        """Before a forward over trees with these ancestors [B, W]; requests [B]: rows of the request table."""
        return LinearTrees(self._pool.get_mamba_indices(requests).long(), plan(ancestors, self._taps), {})

    def commit(self, trees: LinearTrees, accepted: Accepted) -> None:
        """Keep the states after the last accepted nodes."""
        last = accepted.last_nodes()
        for layer in self._layers:
            left = trees.left[layer.layer_id]
            commit_trees(_net(layer), _caches(self._pool, layer), Places(trees.slots), left, trees.tree, last)


def linear_layers(model: Any) -> list[RadixLinearAttention]:
    """The layers of a target that keep a state in place of keys and values."""
    return [layer for layer in model.modules() if isinstance(layer, RadixLinearAttention)]


def linear_attention(
    pool: Any, layer: RadixLinearAttention, trees: LinearTrees, mixed_qkv: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    """One layer over the nodes of B trees: mixed_qkv [B * W, C], a and b [B * W, HV] -> [1, B * W, HV, V]."""
    out = mixed_qkv.new_empty(len(mixed_qkv), layer.num_v_heads, layer.head_v_dim)
    nodes, places = Projections(mixed_qkv, a.view(len(out), -1), b.view(len(out), -1)), Places(trees.slots)
    trees.left[layer.layer_id] = attend_trees(_net(layer), nodes, _caches(pool, layer), places, trees.tree, out)
    return out[None]


def _net(layer: RadixLinearAttention) -> Net:
    return Net(
        key_heads=layer.num_k_heads,
        value_heads=layer.num_v_heads,
        key_dim=layer.head_k_dim,
        value_dim=layer.head_v_dim,
        weight=layer.conv_weights,
        bias=layer.bias,
        a_log=layer.A_log,
        dt_bias=layer.dt_bias,
    )


def _caches(pool: Any, layer: RadixLinearAttention) -> Caches:
    cache = pool.mamba2_layer_cache(layer.layer_id)
    return Caches(cache.conv[0], cache.temporal)
