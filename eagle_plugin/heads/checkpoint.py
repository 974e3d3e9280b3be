"""Checking a draft head against its target before any weight is loaded.

The rules are those of the loaders `LlamaForCausalLMEagle` and `LlamaForCausalLMEagle3` of SGLang 0.5.23. The engine
drops what it does not know and leaves random what it does not find, both silently, so everything is compared by name
and shape here. Only JSON files, the safetensors headers and d2t are read; torch is not imported.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from eagle_plugin.heads.aux_ids import captured_layers
from eagle_plugin.heads.draft_vocabulary import check_draft_vocabulary
from eagle_plugin.heads.files import (
    DTYPES,
    Algorithm,
    HeadError,
    Kind,
    StoredTensor,
    canonical_name,
    mask_token,
    read_config,
    read_size,
    read_tensors,
    text_config,
    wanted_tensors,
)
from eagle_plugin.heads.manifest import compare_target, read_manifest

ARCHITECTURES: dict[str, Algorithm] = {"LlamaForCausalLMEagle": "EAGLE", "LlamaForCausalLMEagle3": "EAGLE3"}
BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class HeadInfo:
    """What the checkpoint of a draft head says about it."""

    architecture: str
    algorithm: Algorithm
    kind: Kind
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int  # vocab_size when the head drafts from the whole vocabulary
    aux_layer_ids: tuple[int, ...]  # target layers whose INPUT is captured: `hidden_states[i]` of transformers
    num_layers: int
    dtype: str
    parameters: int
    bytes: int
    warnings: tuple[str, ...] = ()  # what serves, but probably not well: one sentence each


def check_head(target_dir: str | Path, head_dir: str | Path, *, algorithm: str) -> HeadInfo:
    """Check that stock SGLang can load the head in `head_dir` for the target in `target_dir` and that it fits.

    algorithm is the engine's name: "EAGLE" (EAGLE-1 and EAGLE-2 heads) or "EAGLE3". Takes a few milliseconds, and with
    eagle_plugin.json beside the head as long as reading the target's tokenizer.json.

    Raises:
        HeadError: on the first thing that does not fit.
    """
    if algorithm not in ("EAGLE", "EAGLE3"):
        raise HeadError(f"speculative algorithm is {algorithm}, wanted EAGLE or EAGLE3; choose the one of the head")
    folder = Path(head_dir)
    raw, config = read_config(target_dir), read_config(folder)
    target = text_config(raw)
    architecture = _check_architecture(config, folder, algorithm)
    loader = ARCHITECTURES[architecture]
    _check_dimensions(target, config, folder, loader)
    aux: tuple[int, ...] = ()
    if loader == "EAGLE3":
        aux = captured_layers((raw.get("architectures") or ["?"])[0], target["num_hidden_layers"], config, folder)

    tensors = {canonical_name(name, loader): tensor for name, tensor in read_tensors(folder).items()}
    draft_vocab = (
        check_draft_vocabulary(target, config, folder, tensors) if loader == "EAGLE3" else target["vocab_size"]
    )
    wanted = dict(wanted_tensors(config, loader, draft_vocab, len(aux)))
    _check_tensors(wanted, tensors, folder)
    kind: Kind = "eagle2" if loader == "EAGLE" else "peagle" if "mask_hidden" in tensors else "eagle3"
    if loader == "EAGLE3":
        _check_biases(tensors, folder)
    if kind == "peagle":
        _check_mask(config, wanted["fc.weight"][1], tensors["mask_hidden"], folder)
    used = [tensors[name] for name in wanted]
    return HeadInfo(
        architecture=architecture,
        algorithm=loader,
        kind=kind,
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=draft_vocab,
        aux_layer_ids=aux,
        num_layers=config["num_hidden_layers"],
        dtype=DTYPES[Counter(t.dtype for t in used).most_common(1)[0][0]],
        parameters=sum(prod(t.shape) for t in used),
        bytes=sum(prod(t.shape) * BYTES[t.dtype] for t in used),
        warnings=(*_warn(kind, target, config, folder), *_compare_manifest(aux, folder, target_dir)),
    )


def _check_architecture(config: dict[str, Any], folder: Path, algorithm: str) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    wanted = next(a for a, kind in ARCHITECTURES.items() if kind == algorithm)
    if name not in ARCHITECTURES:
        raise HeadError(
            f"{folder} has architectures {names}, which is no Llama draft head, wanted [{wanted!r}]; "
            "give the head's folder, and set the key if it is an official EAGLE head"
        )
    if ARCHITECTURES[name] != algorithm:
        other = ARCHITECTURES[name]
        raise HeadError(
            f"{folder} holds {name}, but --speculative-algorithm {algorithm} wants {wanted}; "
            f"use --speculative-algorithm {other} with this head"
        )
    return name


def _check_dimensions(target: dict[str, Any], config: dict[str, Any], folder: Path, kind: Algorithm) -> None:
    """Sizes in config.json, against each other and against the target; fills in what the engine's defaults would."""
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        read_size(config, key, folder / "config.json")
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        read_size(target, key, "the target's config.json")
    heads = config["num_attention_heads"]
    if config.get("head_dim") is None and config["hidden_size"] % heads:
        raise HeadError(
            f"{folder} has hidden_size {config['hidden_size']}, which {heads} attention heads do not divide, "
            "and no head_dim; write head_dim into config.json"
        )
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // heads
    config["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    for key in ("head_dim", "num_key_value_heads"):
        read_size(config, key, folder / "config.json")
    if heads % config["num_key_value_heads"]:
        raise HeadError(
            f"{folder} has num_key_value_heads {config['num_key_value_heads']}, wanted a divisor of "
            f"num_attention_heads {heads}; correct config.json to match the head's k_proj"
        )
    if config.get("hidden_act", "silu") != "silu" or config.get("mlp_bias"):
        key = "mlp_bias" if config.get("mlp_bias") else "hidden_act"
        raise HeadError(
            f"{folder} has {key} {config[key]!r}, which the engine's draft MLP cannot do (wanted silu without biases); "
            "train the head with a plain silu MLP"
        )
    if config["vocab_size"] != target["vocab_size"]:
        raise HeadError(
            f"{folder} has vocab_size {config['vocab_size']}, but the target has {target['vocab_size']}; "
            "use the head that was trained for this target"
        )
    key = "target_hidden_size" if kind == "EAGLE3" and "target_hidden_size" in config else "hidden_size"
    if config[key] != target["hidden_size"]:
        raise HeadError(
            f"{folder} has {key} {config[key]}, but the target's hidden_size is {target['hidden_size']}; "
            "use the head that was trained for this target"
        )
    if kind == "EAGLE" and config.get("tie_word_embeddings"):
        raise HeadError(
            f"{folder} has tie_word_embeddings true, with which the engine cannot share the target's lm_head; "
            "set it to false in the head's config.json"
        )


def _check_tensors(wanted: dict[str, tuple[int, ...]], tensors: dict[str, StoredTensor], folder: Path) -> None:
    missing = [name for name in wanted if name not in tensors]
    if missing:
        fix = "export the head again with these tensors"
        if missing == ["fc.bias"]:
            fix = "add zeros of that name if the head was trained without a bias"
        elif missing == ["lm_head.weight"]:
            fix = "export the head's own lm_head (draft_vocab_size null instead shares the target's whole one)"
        elif all(f"model.{name}" in tensors for name in missing):
            fix = "rename them without the prefix 'model.', which the engine's EAGLE loader does not know"
        raise HeadError(
            f"{folder} has {len(tensors)} tensors but not {', '.join(missing)}, "
            f"which the engine would leave random; {fix}"
        )
    for name, shape in wanted.items():
        found = tensors[name]
        if found.shape != shape:
            raise HeadError(
                f"{folder} has {found.name} of shape {list(found.shape)}, wanted {list(shape)} by the sizes in its "
                "config.json and the target's; use the head of this target or correct config.json"
            )
        if found.dtype not in DTYPES:
            raise HeadError(
                f"{folder} has {found.name} as {found.dtype}, wanted one of {', '.join(DTYPES)}; "
                "export the head unquantised"
            )


def _check_biases(tensors: dict[str, StoredTensor], folder: Path) -> None:
    dropped = [name for name in tensors if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))]
    if dropped:
        raise HeadError(
            f"{folder} has {dropped[0]}, which the engine's EAGLE-3 layer drops without a word; "
            "train the head without attention biases"
        )


def _check_mask(config: dict[str, Any], width: int, mask: StoredTensor, folder: Path) -> None:
    """What P-EAGLE adds to EAGLE-3: the features and the token of a masked row."""
    if prod(mask.shape) != width:
        raise HeadError(
            f"{folder} has mask_hidden of shape {list(mask.shape)}, wanted [1, {width}] as fc reads; "
            "export the head again"
        )
    token = mask_token(config)
    if token is None or not 0 <= token < config["vocab_size"]:
        raise HeadError(
            f"{folder} has mask_hidden and mask_token_id {token}, wanted 0 to {config['vocab_size'] - 1}; "
            "write the id of the token that masked rows were trained with into config.json"
        )


def _warn(kind: Kind, target: dict[str, Any], config: dict[str, Any], folder: Path) -> list[str]:
    warnings = []
    own, wanted = config.get("max_position_embeddings"), target.get("max_position_embeddings")
    if own is not None and wanted is not None and own < wanted:
        warnings.append(
            f"{folder} has max_position_embeddings {own}, below the target's {wanted}, with which SGLang does not "
            f"start unless --context-length is at most {own}; write {wanted} into the head's config.json"
        )
    if kind == "peagle":
        warnings.append(
            f"{folder} is a P-EAGLE head, which stock SGLang drafts with one token at a time as it was not trained to; "
            'serve it with vLLM and "parallel_drafting": true'
        )
    return warnings


def _compare_manifest(aux: tuple[int, ...], folder: Path, target_dir: str | Path) -> list[str]:
    manifest = read_manifest(folder)
    if manifest is None:
        return []
    if manifest["aux_layers"] != aux:
        raise HeadError(
            f"{folder} was trained on the inputs of target layers {list(manifest['aux_layers'])}, but the engine would "
            f"capture {list(aux)} by its config.json; export the head again"
        )
    return compare_target(manifest, target_dir, folder)
