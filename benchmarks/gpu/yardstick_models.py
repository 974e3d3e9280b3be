"""The models of the yardstick: configurations without weights, and EAGLE-3 heads of published sizes.

The target's weights are the engine's dummies. Those of a head are written: its logits must be as far apart as a trained
head's, or all its trees would be flat, and no path of them as long as the rates say.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu.models import TINY
from benchmarks.roofline import DRAFT_VOCABULARY, LLAMA_8B, Decoder

SHARPNESS = 8.0  # standard deviation of a head's logits: its most likely token then has about half of the probability
AUX_STATES = 3
COMMON = {
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


class Model(NamedTuple):
    """A target's shape, and its head's."""

    name: str
    decoder: Decoder
    experts: dict[str, int]  # further keys of a mixture of experts; empty for a dense model
    head_intermediate: int
    draft_vocabulary: int
    memory: float  # GiB of an engine of it on a GPU beside its KV cache: weights, graphs, activations

    def memory_with(self, tokens: int) -> float:
        """GiB of an engine whose KV cache has so many tokens, in bfloat16; the head has a layer too."""
        layers, width = self.decoder.layers + 1, self.decoder.kv_heads * self.decoder.head_dim
        return self.memory + 2 * 2 * layers * width * tokens / 2**30

    def target_config(self, dtype: str) -> dict[str, Any]:
        """The target's config.json."""
        found = COMMON | _sizes(self.decoder) | {"torch_dtype": dtype, "num_hidden_layers": self.decoder.layers}
        if not self.experts:
            return found | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        found |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "mlp_only_layers": []}
        return found | self.experts | {"decoder_sparse_step": 1, "norm_topk_prob": True}

    def head_config(self, dtype: str) -> dict[str, Any]:
        """The head's config.json."""
        found = COMMON | _sizes(self.decoder) | {"torch_dtype": dtype, "num_hidden_layers": 1}
        found |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
        found |= {"intermediate_size": self.head_intermediate, "draft_vocab_size": self.draft_vocabulary}
        found |= {"target_hidden_size": self.decoder.hidden, "num_aux_hidden_states": AUX_STATES}
        return found | {"norm_before_residual": False, "eagle_config": {"use_aux_hidden_state": True}}


def _sizes(decoder: Decoder) -> dict[str, int]:
    return {
        "hidden_size": decoder.hidden,
        "intermediate_size": decoder.intermediate,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "vocab_size": decoder.vocabulary,
    }


QWEN_30B_A3B = Decoder(48, 2048, 6144, 32, 4, 128, 151936)  # Qwen/Qwen3-30B-A3B
MODELS = (
    Model("Llama-3.1-8B shape", LLAMA_8B, {}, LLAMA_8B.intermediate, DRAFT_VOCABULARY, 22.7),
    Model(
        "Qwen3-30B-A3B shape",
        QWEN_30B_A3B,
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        12288,
        DRAFT_VOCABULARY,
        66.6,
    ),
)
_TINY = TINY._replace(layers=7, head_dim=32)  # vLLM's attention on a CPU wants heads of 32 at least
TINY_MODELS = (
    Model("tiny Llama", _TINY, {}, 128, 128, 0),
    Model(
        "tiny mixture of experts",
        _TINY,
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        128,
        128,
        0,
    ),
)


def write_models(model: Model, folder: Path, dtype: str, device: str) -> tuple[Path, Path]:
    """Write the target's folder, which has no weights, and the head's; device: where random numbers are drawn."""
    target, head = folder / "target", folder / "head"
    for path, config in ((target, model.target_config(dtype)), (head, model.head_config(dtype))):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_file(_head_tensors(model, getattr(torch, dtype), device), head / "model.safetensors")
    return target, head


def _head_tensors(model: Model, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    decoder, vocabulary = model.decoder, model.draft_vocabulary
    hidden, inner = decoder.hidden, model.head_intermediate
    q, kv = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    generator = torch.Generator(device).manual_seed(1)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        drawn = torch.randn(rows, columns, dtype=dtype, device=device, generator=generator)
        return (drawn * (gain / math.sqrt(columns))).cpu()

    ones = torch.ones(hidden, dtype=dtype)
    kept = torch.arange(vocabulary) * (decoder.vocabulary // vocabulary)
    return {
        "fc.weight": matrix(hidden, AUX_STATES * hidden),
        "midlayer.self_attn.q_proj.weight": matrix(q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": matrix(kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": matrix(kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, q),
        "midlayer.mlp.gate_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.up_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, inner),
        "midlayer.input_layernorm.weight": ones,
        "midlayer.hidden_norm.weight": ones.clone(),
        "midlayer.post_attention_layernorm.weight": ones.clone(),
        "norm.weight": ones.clone(),
        "lm_head.weight": matrix(vocabulary, hidden, SHARPNESS),
        "d2t": kept - torch.arange(vocabulary),
        "t2d": torch.zeros(decoder.vocabulary, dtype=torch.bool).index_fill_(0, kept, True),
    }
