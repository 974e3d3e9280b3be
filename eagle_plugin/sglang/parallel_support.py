"""Says what is not served beside data-parallel attention (``--attn-dp-size``), and why."""

from __future__ import annotations

from typing import Any

FLAG = "--attn-dp-size"


def unsupported_flags_beside(arguments: Any) -> list[str]:
    """Why our worker does not support these resolved server arguments of a server with data-parallel attention."""
    if (arguments.attn_dp_size or 1) == 1:
        return []
    from sglang.srt.environ import envs

    with_flag, reasons = f"with {FLAG} {arguments.attn_dp_size}", []
    if arguments.tp_size != arguments.attn_dp_size:
        reasons.append(
            f"--tp-size {arguments.tp_size} {with_flag}: several ranks with the same requests are not served"
        )
    if envs.SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION.get():
        reasons.append(
            f"SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION {with_flag}: rounds beside prompts of other ranks are not "
            "served yet"
        )
    if arguments.enable_lora or arguments.lora_paths:
        reasons.append(f"--enable-lora {with_flag}: adapters are served without it only")
    return reasons


def unsupported_models_beside(arguments: Any, target_runner: Any, draft_config: Any) -> list[str]:
    """The same of the loaded target (an SGLang ``ModelRunner``) and the configuration of the head (``ModelConfig``)."""
    if (arguments.attn_dp_size or 1) == 1:
        return []
    from sglang.srt.configs.hybrid_arch import mambaish_config

    config, head = target_runner.model_config, draft_config.hf_config
    with_flag, reasons = f"with {FLAG} {arguments.attn_dp_size}", []
    if mambaish_config(config) is not None:
        reasons.append(f"target {config.hf_config.architectures[0]} {with_flag}: states are served without it only")
    if head.architectures[0] == "LlamaForCausalLMEagle":
        reasons.append(
            f"draft head {head.architectures[0]} {with_flag}: SGLang divides it among ranks that have other requests; "
            "an EAGLE-3 head is served"
        )
    elif _reads_output_layer(head) and _is_divided(target_runner.model):
        reasons.append(
            f"draft head {head.architectures[0]} {with_flag}: it has no output layer of its own, and that of the "
            "target is divided among ranks that have other requests; --enable-dp-lm-head divides it otherwise"
        )
    return reasons


def _reads_output_layer(head: Any) -> bool:
    """Whether a head with this config.json computes its logits by the output layer of the target."""
    return getattr(head, "draft_vocab_size", None) is None and not getattr(head, "tie_word_embeddings", False)


def _is_divided(target: Any) -> bool:
    """Whether the target's output layer is divided among more ranks than have the same requests."""
    from sglang.srt.runtime_context import get_parallel

    parallel, layer = get_parallel(), getattr(target, "lm_head", None)
    return bool(getattr(layer, "tp_size", parallel.tp_size) > parallel.attn_tp_size)
