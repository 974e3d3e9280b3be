"""Tiny random targets of many families with heads, for the engines: they say different things on different prompts.

A target says 24 printable tokens, and a head drafts these alone: a wide tree of any head is then accepted now and then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_checkpoints import PAD, printable_ids, read_config, write_config, write_tokenizer
from tiny_targets import tiny_target

from eagle_plugin.heads.create import new_head
from eagle_plugin.heads.export import save_head

SPOKEN = 24
VOCAB = 512
WINDOW = 16  # tokens that a layer with a sliding window sees
CHUNK = 32  # tokens of an attention chunk; vLLM wants a multiple of its blocks' size
# vLLM decodes plainly on a CPU with latent rows of 512 + 64 numbers alone, and right with YaRN alone: docs/upstream.md.
LATENT_ROWS: dict[str, Any] = {
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_layer_freq": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
# What differs from tiny_targets.ARCHITECTURES. vLLM's attention on a CPU wants heads of 32 dimensions or more.
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"num_attention_heads": 2, "num_key_value_heads": 2},
    "qwen3": {},
    "qwen3_moe": {},
    "gemma3_text": {"sliding_window": WINDOW},
    # SGLang reads the swa_ keys, which the configuration of the text model alone does not have.
    "gemma4_text": {
        "sliding_window": WINDOW,
        "global_head_dim": 32,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
    },
    "gpt_oss": {"sliding_window": WINDOW},
    "llama4_text": {"attention_chunk_size": CHUNK},
    "deepseek_v3": LATENT_ROWS | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},  # of the published checkpoints
    "deepseek_v2": LATENT_ROWS,
    "qwen3_next": {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "full_attention_interval": 4},
}
LATENT = ("deepseek_v2", "deepseek_v3")  # latent attention (MLA), which is served in vLLM alone
# Of the text model's own class SGLang loads no experts (docs/upstream.md).
SGLANG_CLASSES = {"llama4_text": "Llama4ForConditionalGeneration"}
# Without these such a target repeats one token: (part of a parameter's name, factor), the first one that fits counts.
SCALES: dict[str, tuple[tuple[str, float], ...]] = {
    "qwen3_moe": (("embed", 4.0),),
    "gemma3_text": (("embed", 0.3),),
    "gemma4_text": (("embed", 0.3),),
    "deepseek_v2": (("embed", 3.0),),
    "deepseek_v3": (("embed", 3.0),),
    "gpt_oss": (("embed", 8.0), ("bias", 0.3), ("experts", 6.0)),
}
# The lower temperature at which text is sampled: their logits are so close that 0.5 looks like 1.
LOW_TEMPERATURES = {"gemma3_text": 0.1, "gemma4_text": 0.1}

KINDS = ("eagle3", "peagle", "eagle2")
# Layers whose states an EAGLE-3 head reads; of DeepSeek's SGLang does not give that of the first layer.
AUX_LAYERS = dict.fromkeys(LATENT, (2, 4, 6))
# Layers of a P-EAGLE head, where two are not served: beside four layers with windows and four without, vLLM puts the
# caches of two layers into two groups.
PEAGLE_LAYERS = {"gpt_oss": 1}


def sampling_settings(family: str) -> list[dict[str, Any]]:
    """Two temperatures that a few hundred texts of this family tell apart."""
    return [{"temperature": 1.0}, {"temperature": LOW_TEMPERATURES.get(family, 0.5)}]


@torch.no_grad()
def family_target(folder: Path, family: str, seed: int = 0, says: int = SPOKEN, **changes: Any) -> Path:
    """Write a target of a family that says so many tokens, with a tokenizer, in float32; `changes` of its config."""
    printable = write_tokenizer(folder, VOCAB)
    sizes = {"vocab_size": VOCAB, "head_dim": 32, "max_position_embeddings": 1024}
    own = CHANGES.get(family, {}) | changes
    model = tiny_target(family, seed=seed, **sizes | own)
    let_speak(model, family, spoken(printable, says))
    model.save_pretrained(folder)
    # transformers drops what it has other words for
    write_config(folder, **own | read_config(folder))
    return folder


@torch.no_grad()
def let_speak(model: Any, family: str, ids: torch.Tensor) -> None:
    """Scale the weights of a language model of this family so that it says these tokens, and not one alone."""
    for name, parameter in model.named_parameters():
        if "vision" not in name:
            parameter.mul_(next((factor for part, factor in SCALES.get(family, ()) if part in name), 1.0))
    # Of the engines' Gemma the embedding is the head. Its rows are normed before they are read.
    weight = model.get_output_embeddings().weight
    weight.mul_(torch.full((len(weight), 1), 0.02).index_fill_(0, ids, 1.0))


def sglang_target(folder: Path, family: str, **options: Any) -> Path:
    """`family_target` under the class by which SGLang serves its texts."""
    target = family_target(folder, family, **options)
    if family in SGLANG_CLASSES:
        write_config(target, **read_config(target) | {"architectures": [SGLANG_CLASSES[family]]})
    return target


def spoken(printable: list[int], says: int = SPOKEN) -> torch.Tensor:
    """The ids that a target says, ascending."""
    return torch.tensor(printable[:: len(printable) // says][:says])


def family_head(
    folder: Path, target: Path, kind: str = "eagle3", says: int = SPOKEN, layers: int | None = None
) -> Path:
    """Write an untrained head of a kind for such a target; layers: of P-EAGLE."""
    printable = printable_ids(target)
    options: dict[str, Any] = {}
    model_type = read_config(target)["model_type"]
    if kind != "eagle2":
        options = {"draft_ids": spoken(printable, says), "aux_layers": AUX_LAYERS.get(model_type, (1, 4, 6))}
    if kind == "peagle":
        layers = layers or PEAGLE_LAYERS.get(model_type, 2)
        options |= {"layers": layers, "mask_token_id": PAD}
    head = new_head(kind, target, num_heads=2, num_kv_heads=2, head_dim=32, **options)
    save_head(head, folder, target_dir=target, dtype=torch.float32)
    return folder
