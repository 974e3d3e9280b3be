"""What stock SGLang lacks for Llama 4 on a CPU without AMX.

- The layers compute in the model's dtype and keep the rotated queries and keys. The engine's forward makes bfloat16 of
  them, whatever the dtype of its cache, and reads them from the memory that its GPU kernels rotate in place.
- Local layers attend within chunks. The engine gives its backend on a CPU a sliding window at most. So a layer names
  its chunk where others name a window, as a number below -1, and sgl_kernel.ops tells the two apart.
- Experts whose router's weight scales the input. The engine's torch code refuses them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

ATTENTION = "sglang.srt.models.llama4.Llama4Attention"
EXPERTS = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"


def name_chunk(_: None, layer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """After the constructor of a Llama4Attention: chunks of n tokens are a window of -n - 1."""
    if layer.use_rope and config.attention_chunk_size:
        layer.attn.sliding_window_size = -config.attention_chunk_size - 1


def attend(
    _: Callable[..., torch.Tensor],
    layer: Any,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    forward_batch: Any,
) -> torch.Tensor:
    """Run a Llama4Attention on hidden_states [N, H] at positions [N]; returns [N, H]."""
    qkv, _ = layer.qkv_proj(hidden_states)
    q, k, v = qkv.split([layer.q_size, layer.kv_size, layer.kv_size], dim=-1)
    if layer.rotary_emb is not None:
        q, k = layer.rotary_emb(positions, q, k)
    if layer.qk_norm is not None:
        q, k = (layer.qk_norm(x.reshape(-1, layer.head_dim)).view(x.shape) for x in (q, k))
    if layer.attn_temperature_tuning and not layer.use_rope:
        q = (q * layer._get_attn_scale(positions)).to(q.dtype)
    return layer.o_proj(layer.attn(q, k, v, forward_batch))[0]


def weigh_inputs(
    run: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk_output: Any, config: Any
) -> torch.Tensor:
    """Run experts [N, H] -> [N, H] whose input is weighed, where each token has one: what it weighs is then known."""
    weights = topk_output.topk_weights
    if not config.apply_router_weight_on_input or weights.shape[1] != 1:
        return run(layer, x, topk_output, config)
    unweighed = topk_output._replace(topk_weights=torch.ones_like(weights))
    return run(
        layer, x * weights.to(x.dtype), unweighed, dataclasses.replace(config, apply_router_weight_on_input=False)
    )


def register() -> None:
    """Register the hooks with SGLang's HookRegistry."""
    HookRegistry.register(f"{ATTENTION}.__init__", name_chunk, HookType.AFTER)
    HookRegistry.register(f"{ATTENTION}.forward", attend, HookType.AROUND)
    HookRegistry.register(EXPERTS, weigh_inputs, HookType.AROUND)
