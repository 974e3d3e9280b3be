"""Loading any head for training and evaluation: ours, official EAGLE, SpecForge's and speculators' checkpoints.

The rules of serving are `check_head`'s; this reader also understands checkpoints that an engine cannot take as they
are. `save_head` writes what it returns in the form that both engines load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from eagle_plugin.heads.aux_ids import Reading, read_aux_candidates
from eagle_plugin.heads.eagle2 import Eagle2Head
from eagle_plugin.heads.eagle3 import Eagle3Head
from eagle_plugin.heads.files import HeadError, Kind, load_weights, mask_token, read_config
from eagle_plugin.heads.layers import DraftHead, fill
from eagle_plugin.heads.peagle import PEagleHead
from eagle_plugin.heads.target_files import TargetFiles

__all__ = ["Reading", "load_any_head", "read_aux_candidates"]


def load_any_head(
    folder: str | Path, target_dir: str | Path, dtype: torch.dtype | None = None, reading: Reading | None = None
) -> DraftHead:
    """Load a head on the CPU with the embedding (and, for EAGLE-2, the lm_head) of the target in target_dir.

    dtype: of the parameters (None: that of the checkpoint's fc). reading: one of `read_aux_candidates`, wanted only
    where the checkpoint can be understood in several ways.

    Raises:
        HeadError: the checkpoint is ambiguous, incomplete, of another target, or of a form that no class here computes.
    """
    folder = Path(folder)
    weights = load_weights(folder, "EAGLE3")  # the names of EAGLE-3 cover those of EAGLE
    kind = _find_kind(weights, folder)
    config = _llama_keys(read_config(folder), kind)
    target = TargetFiles(target_dir)
    _check_sizes(config, target, folder)
    _check_computable(config, weights, kind, folder)
    reading = reading or _only_reading(folder, target_dir)
    shared = {"embedding": target.embedding()}
    if kind == "eagle2":
        shared["lm_head"] = target.lm_head()
        weights.setdefault("fc.bias", torch.zeros(target.hidden_size))  # EAGLE-1 heads come with it and without
        return fill(Eagle2Head(LlamaConfig(**config)), weights, shared, dtype, folder)
    _settle_layer_norms(weights, config["num_hidden_layers"], folder)
    config["norm_output"] = reading.norm_output
    tied = config.pop("tie_word_embeddings", False)
    if config.get("draft_vocab_size") is None:
        weights.setdefault("lm_head.weight", target.embedding() if tied else target.lm_head())
        config["draft_vocab_size"] = len(weights["lm_head.weight"])
    if len(reading.aux_layers) * target.hidden_size != weights["fc.weight"].shape[1]:
        raise HeadError(
            f"{folder} has fc.weight with {weights['fc.weight'].shape[1]} inputs, wanted {target.hidden_size} for each "
            f"of its {len(reading.aux_layers)} aux layers; use the head trained for this target"
        )
    if kind == "eagle3":
        return fill(Eagle3Head(LlamaConfig(**config), reading.aux_layers), weights, shared, dtype, folder)
    weights["mask_hidden"] = weights["mask_hidden"].view(1, -1)
    return fill(PEagleHead(LlamaConfig(**config), reading.aux_layers), weights, shared, dtype, folder)


def _find_kind(weights: dict[str, Tensor], folder: Path) -> Kind:
    """By the tensors: official checkpoints call every architecture LlamaForCausalLM."""
    if "fc.weight" not in weights:
        raise HeadError(f"{folder} has no fc.weight, so it is no EAGLE head; give the folder of a draft head")
    if "mask_hidden" in weights:
        return "peagle"
    return "eagle3" if "layers.0.hidden_norm.weight" in weights else "eagle2"


def _llama_keys(raw: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """config.json as LlamaConfig wants it; speculators keep the layer's keys in a part of their own."""
    inner = raw.get("transformer_layer_config")
    config = {**inner, **{k: v for k, v in raw.items() if k not in inner}} if isinstance(inner, dict) else dict(raw)
    if isinstance(inner, dict):
        config["model_type"] = inner.get("model_type", "llama")
        # Speculators' EAGLE-3 norms the residual unless told otherwise, and its P-EAGLE does not know the newer norms.
        config.setdefault("norm_before_residual", kind == "eagle3")
        if kind == "peagle":
            config |= {"fc_norm": False, "norm_output": False}
    if config.get("fc_norm") is None and config.pop("use_aux_norm", False):
        config["fc_norm"] = True
    # What is left of biases after `_check_computable` is none; official EAGLE-1 says "bias" for that of fc.
    config |= {"bias": False, "attention_bias": False}
    if kind == "peagle":
        config["mask_token_id"] = mask_token(raw)
    return config


def _check_sizes(config: dict[str, Any], target: TargetFiles, folder: Path) -> None:
    for key, wanted in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.get(key) != wanted:
            raise HeadError(
                f"{folder} has {key} {config.get(key)}, but the target has {wanted}; "
                "use a head that was trained for this target"
            )


def _check_computable(config: dict[str, Any], weights: dict[str, Tensor], kind: Kind, folder: Path) -> None:
    """Refuse what the engines compute differently from each other or from the modules here."""
    biases = [n for n in weights if n.endswith(".bias") and (n != "fc.bias" or kind != "eagle2")]
    if config.get("model_type", "llama") != "llama":
        found = f"model_type {config['model_type']!r}; train a head of Llama layers"
    elif config.get("norm_before_residual"):
        found = "norm_before_residual true, which SGLang's class cannot compute; train a new head"
    elif config.get("embed_requires_grad"):
        found = "an embedding of its own, which SGLang replaces by the target's; train a head with the target's"
    elif biases:
        found = f"{biases[0]}, and engines differ in which biases of a head they add; train a head without biases"
    elif (config.get("eagle_config") or {}).get("use_aux_hidden_state", True) is False:
        found = "use_aux_hidden_state false; train a head on aux hidden states, or an EAGLE-2 head"
    elif kind == "eagle2" and "layers.0.input_layernorm.weight" in weights:
        found = "a norm before its first layer, which no engine's EAGLE class computes; train a new head"
    elif kind == "peagle" and config["mask_token_id"] is None:
        found = "mask_hidden but no mask_token_id; write the id it was trained with into config.json"
    else:
        return
    raise HeadError(f"{folder} has {found}")


def _only_reading(folder: Path, target_dir: str | Path) -> Reading:
    readings = read_aux_candidates(folder, target_dir)
    if len(readings) > 1:
        options = " or ".join(
            f"{','.join(map(str, r.aux_layers))} ({r.origin}{'' if r.norm_output else ', state not normed'})"
            for r in readings
        )
        raise HeadError(
            f"{folder} can mean the aux layers {options}; "
            "`eagle-plugin check` measures which it was trained on, `eagle-plugin export --aux-layers` writes it down"
        )
    return readings[0]


def _settle_layer_norms(weights: dict[str, Tensor], layers: int, folder: Path) -> None:
    """One name for the first norm of layers after the first: SGLang reads hidden_norm, vLLM input_layernorm."""
    for i in range(1, layers):
        ours, other = f"layers.{i}.hidden_norm.weight", f"layers.{i}.input_layernorm.weight"
        if ours not in weights and other in weights:
            weights[ours] = weights[other]
        elif other in weights and not torch.equal(weights[ours], weights[other]):
            raise HeadError(
                f"{folder} has different {ours} and {other}, of which SGLang reads the first and vLLM the second; "
                "train a new head"
            )
