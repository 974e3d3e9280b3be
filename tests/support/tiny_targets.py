"""Random transformers targets of many architectures, a few thousand parameters each.

Norm weights are random too, so that a norm read as w where the model means 1 + w is seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What differs from BASE, by the model_type of transformers.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "gemma2": {"final_logit_softcapping": 2.0, "sliding_window": 6},
    "gemma3_text": {"sliding_window": 6},
    "gemma4_text": {
        "sliding_window": 6,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
    },
    "granite": {"logits_scaling": 8.0},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 6},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 96, "attention_chunk_size": 8},
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
}
ARCHITECTURES["deepseek_v2"] = ARCHITECTURES["deepseek_v3"] | {"n_shared_experts": 1, "first_k_dense_replace": 2}


def tiny_target(model_type: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of that architecture, in evaluation mode; `changes` replace values of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**BASE, **ARCHITECTURES.get(model_type, {}), **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        draw_weights(model)
    return model.to(dtype).eval()


@torch.no_grad()
def draw_weights(model: Any) -> None:
    """Give a new model weights with which attention, experts and logits are far from uniform."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms and biases
            parameter.add_(0.3 * torch.randn_like(parameter))
        elif parameter.ndim == 2:
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[1] ** 0.5 * (2 if "head" in name else 1))


def write_target(folder: str | Path, model_type: str = "llama", **options: Any) -> Path:
    """Write `tiny_target` as a checkpoint folder, without a tokenizer."""
    folder = Path(folder)
    tiny_target(model_type, **options).save_pretrained(folder)
    return folder
