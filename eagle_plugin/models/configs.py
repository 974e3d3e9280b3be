"""config.json of known targets, as far as it says how large they are: to estimate a job before any download."""

from typing import Any


def _config(model_type: str, architecture: str, hidden: int, width: int, layers: int, **others: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **others,
    }


def _llama(hidden: int, width: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    shape = {"num_attention_heads": heads, "vocab_size": 128256, **others}
    return _config("llama", "LlamaForCausalLM", hidden, width, layers, **shape)


def _qwen3(hidden: int, width: int, layers: int, heads: int) -> dict[str, Any]:
    return _config(
        "qwen3", "Qwen3ForCausalLM", hidden, width, layers, num_attention_heads=heads, vocab_size=151936
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    shape = {"num_attention_heads": 64, "head_dim": 64, "vocab_size": 201088}
    mixture = {"num_local_experts": experts, "num_experts_per_tok": 4, "quantization_config": {"quant_method": "mxfp4"}}
    return _config("gpt_oss", "GptOssForCausalLM", 2880, 2880, layers, **shape, **mixture)


CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2-135m-instruct": _llama(
        576, 1536, 30, 9, num_key_value_heads=3, head_dim=64, vocab_size=49152, tie_word_embeddings=True
    ),
    "llama-3.1-8b-instruct": _llama(4096, 14336, 32, 32),
    "llama-3.3-70b-instruct": _llama(8192, 28672, 80, 64),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "qwen3-235b-a22b": _config(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        4096,
        12288,
        94,
        num_attention_heads=64,
        num_key_value_heads=4,
        vocab_size=151936,
        moe_intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}
