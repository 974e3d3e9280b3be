"""The places where stock SGLang needs help on a CPU without AMX.

Attention: on a CPU the engine chooses the backend `intel_amx` and, where AMX is missing, replaces it by `torch_native`,
which cannot verify draft trees. `intel_amx` is plain Python over torch.ops.sgl_kernel.{decode,extend}_attention_cpu,
which we provide, and nothing else in it needs AMX. So it is enough to skip that one replacement: the engine's own
backend, its draft backends (DraftBackendFactory's closed maps) and every check for the name "intel_amx" then work
unchanged. A backend with a name of our own would need two more hooks in DraftBackendFactory and fail those checks.

Norm, activation, rotary positions: without AMX the engine runs forward_native of these layers, chains of torch
operations that take about 4 ms of a 24 ms token of a 30-layer model on two cores. One call each does the same; variants
of the layers keep the chain.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from eagle_sglang_cpu import elementwise, experts, llama4

ATTENTION_FALLBACK = "sglang.srt.arg_groups.overrides._attention_backend_platform_fallbacks"
GATHER_SPEC_EXTRAS = "sglang.kernels.ops.speculative.gather_spec_extras.gather_spec_extras"
SELECT_TOP_K = "sglang.srt.speculative.spec_utils._select_top_k_tokens_later"
MULTINOMIAL_WITH_SEED = "sglang.srt.layers.sampler.multinomial_with_seed"
RMS_NORM = "sglang.srt.layers.layernorm.RMSNorm.forward_native"
SILU_AND_MUL = "sglang.srt.layers.activation.SiluAndMul.forward_native"
EXTRA_BUFFER = "sglang.srt.arg_groups.overrides.supports_mamba_cache_extra_buffer"
GATED_NORM = "sglang.kernels.ops.attention.fla.fused_norm_gate.rms_norm_gated"
GATED_LAYER_NORM = "sglang.kernels.ops.attention.fla.layernorm_gated.rms_norm_gated"
SHARED_EXPERT_GATE = "sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul"
ROTARY = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native"


def keep_intel_amx(fallbacks: Callable[[Any], dict], view: Any) -> dict:
    """Keep `intel_amx` as the attention backend, except for models with latent attention (MLA): no kernels of ours."""
    from sglang.srt.arg_groups.overrides import use_mla_backend

    if view.device == "cpu" and view.attention_backend == "intel_amx" and not use_mla_backend(view):
        return {}
    return fallbacks(view)


def gather_rows(
    gather: Callable[..., tuple],
    indices: torch.Tensor,
    topk_p: torch.Tensor,
    topk_index: torch.Tensor,
    output_tokens: torch.Tensor,
    hidden_states: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gather the relayed draft state by index: the engine has only a Triton kernel for it, which no CPU can launch."""
    if indices.device.type != "cpu":
        return gather(indices, topk_p, topk_index, output_tokens, hidden_states)
    hidden = None if hidden_states is None else hidden_states[indices]
    return topk_p[indices], topk_index[indices], output_tokens[indices], hidden


def run_uncompiled(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function inside a torch.compile wrapper: compiling delays the first requests and saves nothing later.

    Measured (1 thread), compiled against plain: the draft's beam step stalls for 3 to 20 s and then takes 28 us per
    call against 17 (beam 4, hidden size 576); seeded sampling stalls for 7 s and then takes 0.7 ms against 0.7 for one
    row of 49152 logits, 2.5 against 1.5 for four.
    """
    return inspect.unwrap(compiled)(*args, **kwargs)


def fused_rms_norm(
    chain: Callable[..., Any],
    norm: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    """Run the ordinary RMSNorm in one call; its variants stay with the engine's chain of torch operations."""
    from sglang.srt.layers.layernorm import RMSNorm

    ordinary = (
        type(norm).forward_native is RMSNorm.forward_native
        and post_residual_addition is None
        and norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
        and x.shape[-1] == norm.hidden_size
    )
    served = elementwise.rms_norm(x, norm.weight, norm.variance_epsilon, residual) if ordinary else None
    if served is None:
        return chain(norm, x, residual, post_residual_addition, quant_linear)
    return served[0] if residual is None else served


def fused_silu_and_mul(chain: Callable[..., Any], layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Run SiLU and the product in one call."""
    served = elementwise.silu_and_mul(x)
    return chain(layer, x) if served is None else served


def fused_rotary(
    chain: Callable[..., Any],
    rope: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> Any:
    """Rotate queries and keys in one call; interleaved rotations and offsets stay with the engine's chain."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    served = None
    ordinary = type(rope).forward_native is RotaryEmbedding.forward_native and rope.is_neox_style
    if ordinary and offsets is None and fused_set_kv_buffer_arg is None and key is not None:
        served = elementwise.rotary(positions, query, key, rope.cos_sin_cache, rope.head_size)
    return chain(rope, positions, query, key, offsets, fused_set_kv_buffer_arg) if served is None else served


def extra_buffer_is_served(supports: Callable[[Any, Any], bool], view: Any, hf_config: Any) -> bool:
    """Not on a CPU: there the engine takes this strategy of its prefix cache by itself, and then ends because of it."""
    return view.device != "cpu" and supports(view, hf_config)


def gated_norm(
    kernel: Callable[..., torch.Tensor],
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    **options: Any,
) -> Any:
    """Normalise, then multiply with the gate, as Qwen3-Next does: the engine has a Triton kernel alone for it."""
    if x.device.type != "cpu" or bias is not None or residual is not None:
        return kernel(x, gate, weight, bias, activation, residual=residual, eps=eps, **options)
    return _norm_and_gate(x, gate, weight, activation, eps)


def gated_layer_norm(
    kernel: Callable[..., torch.Tensor],
    *,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "swish",
    **options: Any,
) -> torch.Tensor:
    """The same of Qwen3.5, in another class of the engine."""
    ordinary = options == {"group_size": None, "norm_before_gate": True, "is_rms_norm": True}
    if x.device.type != "cpu" or bias is not None or z is None or not ordinary:
        return kernel(x=x, weight=weight, bias=bias, z=z, eps=eps, activation=activation, **options)
    return _norm_and_gate(x, z.reshape(x.shape), weight, activation, eps)


def _norm_and_gate(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, activation: str, eps: float
) -> torch.Tensor:
    normed = torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps)
    opened = gate.float().sigmoid()
    return (normed * (opened if activation == "sigmoid" else gate.float() * opened)).to(x.dtype)


def gate_shared_expert(
    kernel: Callable[..., None],
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
    *,
    do_add: bool,
) -> None:
    """Multiply the shared expert with its gate, and add it: the engine has a Triton kernel alone for it."""
    if hidden_states.device.type != "cpu":
        kernel(hidden_states, gate_weight, shared_output, output, do_add=do_add)
        return
    gated = (hidden_states.float() @ gate_weight.float()).sigmoid()[:, None] * shared_output.float()
    output.copy_(gated + output.float() if do_add else gated)


def register() -> None:
    """Register the hooks with SGLang's HookRegistry, which applies them after all plugins have run."""
    HookRegistry.register(ATTENTION_FALLBACK, keep_intel_amx, HookType.AROUND)
    HookRegistry.register(GATHER_SPEC_EXTRAS, gather_rows, HookType.AROUND)
    HookRegistry.register(SELECT_TOP_K, run_uncompiled, HookType.AROUND)
    HookRegistry.register(MULTINOMIAL_WITH_SEED, run_uncompiled, HookType.AROUND)
    HookRegistry.register(RMS_NORM, fused_rms_norm, HookType.AROUND)
    HookRegistry.register(SILU_AND_MUL, fused_silu_and_mul, HookType.AROUND)
    HookRegistry.register(ROTARY, fused_rotary, HookType.AROUND)
    HookRegistry.register(EXTRA_BUFFER, extra_buffer_is_served, HookType.AROUND)
    HookRegistry.register(GATED_NORM, gated_norm, HookType.AROUND)
    HookRegistry.register(GATED_LAYER_NORM, gated_layer_norm, HookType.AROUND)
    HookRegistry.register(SHARED_EXPERT_GATE, gate_shared_expert, HookType.AROUND)
    llama4.register()
    experts.register()
