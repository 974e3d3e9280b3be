"""Says which targets our worker does not serve, by what their configuration names, and why."""

from __future__ import annotations

from typing import Any

# Targets with linear layers that our worker computes.
GATED_DELTA_NETS = ("Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")


def unsupported_config(config: Any) -> list[str]:
    """Why our worker does not support a target of this configuration (an SGLang ``ModelConfig``), loaded or not."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch, is_minimax_sparse

    name = config.hf_config.architectures[0]
    reasons = []
    if config.attention_arch == AttentionArch.MLA:
        reasons.append(f"target {name}: latent (MLA) attention is not served yet")
    if mambaish_config(config) is not None and name not in GATED_DELTA_NETS:
        reasons.append(f"target {name}: linear-attention and state-space layers are not served yet")
    if is_minimax_sparse(config.hf_config):
        reasons.append(f"target {name}: sparse attention by blocks is not served")
    if config.is_encoder_decoder:
        reasons.append(f"target {name}: encoder-decoder models are not served")
    return reasons
