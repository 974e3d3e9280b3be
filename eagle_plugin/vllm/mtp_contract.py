"""The part of `engine_contract` for targets' own layers for multi-token prediction (MTP)."""

from __future__ import annotations

from eagle_plugin.runtime.engine_contract import Contract

_MODELS = "vllm.model_executor.models"
_FORWARD = "self input_ids positions hidden_states intermediate_tensors inputs_embeds ..."
_LOGITS = "self hidden_states spec_step_idx"
# vLLM's classes, which give one tensor; those of `mtp_support.SERVED` under the names of its registry.
MODELS = {
    "MiMoMTPModel": f"{_MODELS}.mimo_mtp.MiMoMTP",
    "Qwen3NextMTP": f"{_MODELS}.qwen3_next_mtp.Qwen3NextMTP",
    "Qwen3_5MTP": f"{_MODELS}.qwen3_5_mtp.Qwen3_5MTP",
    "Qwen3_5MoeMTP": f"{_MODELS}.qwen3_5_mtp.Qwen3_5MoeMTP",
    "Glm4MoeMTPModel": f"{_MODELS}.glm4_moe_mtp.Glm4MoeMTP",
    "ExaoneMoeMTP": f"{_MODELS}.exaone_moe_mtp.ExaoneMoeMTP",
}

MTP_CONTRACT: Contract = dict.fromkeys(MODELS.values(), {"forward": _FORWARD, "compute_logits": _LOGITS})
