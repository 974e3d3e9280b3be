"""Gated-delta-net layers (Qwen3-Next) in forwards over trees: from the engine's pool of states, and back into it."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from torch import Tensor

from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.gated_delta import (
    Left,
    TreePlan,
    convolve,
    delta_rule,
    gates,
    past_after,
    plan,
    state_after,
)


class LinearTrees(NamedTuple):
    """One forward over trees of B lanes: what its layers share, and what each of them leaves."""

    slots: Tensor  # [B] int64: where the engine keeps the states of the lanes' requests; 0 of padding lanes
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
        last = accepted.index.gather(1, accepted.lengths[:, None].long() - 1)[:, 0].long()
        for layer in self._layers:
            cache = self._pool.mamba2_layer_cache(layer.layer_id)
            states, pasts, left = cache.temporal, cache.conv[0], trees.left[layer.layer_id]
            states[trees.slots] = state_after(states[trees.slots], left, trees.tree, last)
            pasts[trees.slots] = past_after(left, trees.tree, last).to(pasts.dtype)


def linear_layers(model: Any) -> list[RadixLinearAttention]:
    """The layers of a target that keep a state in place of keys and values."""
    return [layer for layer in model.modules() if isinstance(layer, RadixLinearAttention)]


def linear_attention(
    pool: Any, layer: RadixLinearAttention, trees: LinearTrees, mixed_qkv: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    """One layer over the nodes of B trees: mixed_qkv [B * W, C], a and b [B * W, HV] -> [1, B * W, HV, V]."""
    cache = pool.mamba2_layer_cache(layer.layer_id)
    lanes, width = trees.tree.seen.shape[:2]
    rows = mixed_qkv.view(lanes, width, -1)
    mixed, inputs = convolve(rows, cache.conv[0][trees.slots], layer.conv_weights, layer.bias, trees.tree)
    q, k, v = (
        part.view(lanes, width, heads, -1)
        for part, heads in zip(
            mixed.split([layer.q_dim, layer.k_dim, layer.v_dim], -1),
            (layer.num_q_heads, layer.num_k_heads, layer.num_v_heads),
            strict=True,
        )
    )
    log_decay, beta = (x.view(lanes, width, -1) for x in gates(a, b, layer.A_log, layer.dt_bias))
    out, *left = delta_rule(q, k, v, log_decay, beta, cache.temporal[trees.slots], trees.tree)
    trees.left[layer.layer_id] = Left(inputs, *left)
    return out.reshape(1, lanes * width, layer.num_v_heads, layer.head_v_dim)
