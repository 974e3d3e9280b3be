"""Checking a draft head against its target before any weight is loaded.

The rules are those of the loaders `LlamaForCausalLMEagle` and `LlamaForCausalLMEagle3` of SGLang 0.5.23. The engine
drops what it does not know and leaves random what it does not find, both silently, so everything is compared by name
and shape here. Only config.json, the safetensors headers and d2t are read; torch is not imported.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from eagle_plugin.heads.files import (
    Algorithm,
    HeadError,
    StoredTensor,
    canonical_name,
    read_config,
    read_tensors,
    wanted_tensors,
)

ARCHITECTURES: dict[str, Algorithm] = {"LlamaForCausalLMEagle": "EAGLE", "LlamaForCausalLMEagle3": "EAGLE3"}
BYTES = {"BF16": 2, "F16": 2, "F32": 4}
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True)
class HeadInfo:
    """What the checkpoint of a draft head says about it."""

    architecture: str
    algorithm: Algorithm
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int  # vocab_size when the head drafts from the whole vocabulary
    aux_layer_ids: tuple[int, ...]  # target layers whose INPUT is captured: `hidden_states[i]` of transformers
    num_layers: int
    dtype: str
    parameters: int
    bytes: int


def check_head(target_dir: str | Path, head_dir: str | Path, *, algorithm: str) -> HeadInfo:
    """Check that stock SGLang can load the head in `head_dir` for the target in `target_dir` and that it fits.

    algorithm is the engine's name: "EAGLE" (EAGLE-1 and EAGLE-2 heads) or "EAGLE3". Takes a few milliseconds.

    Raises:
        HeadError: on the first thing that does not fit.
    """
    if algorithm not in ("EAGLE", "EAGLE3"):
        raise HeadError(f"speculative algorithm is {algorithm}, wanted EAGLE or EAGLE3; choose the one of the head")
    folder = Path(head_dir)
    target, config = read_config(target_dir), read_config(folder)
    target = {**target, **target["text_config"]} if isinstance(target.get("text_config"), dict) else target
    architecture = _check_architecture(config, folder, algorithm)
    kind = ARCHITECTURES[architecture]
    _check_dimensions(target, config, folder, kind)
    aux = _aux_layers(target, config, folder) if kind == "EAGLE3" else ()

    stored = read_tensors(folder)
    tensors = {canonical_name(name, kind): tensor for name, tensor in stored.items()}
    draft_vocab = _check_draft_vocabulary(target, config, folder, tensors) if kind == "EAGLE3" else config["vocab_size"]
    wanted = dict(wanted_tensors(config, kind, draft_vocab, len(aux)))
    _check_tensors(wanted, tensors, folder)
    used = [tensors[name] for name in wanted]
    return HeadInfo(
        architecture=architecture,
        algorithm=kind,
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=draft_vocab,
        aux_layer_ids=aux,
        num_layers=config["num_hidden_layers"],
        dtype=DTYPES[Counter(t.dtype for t in used).most_common(1)[0][0]],
        parameters=sum(prod(t.shape) for t in used),
        bytes=sum(prod(t.shape) * BYTES[t.dtype] for t in used),
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
        _positive(config, key, folder / "config.json")
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        _positive(target, key, Path("the target's config.json"))
    heads = config["num_attention_heads"]
    if config.get("head_dim") is None and config["hidden_size"] % heads:
        raise HeadError(
            f"{folder} has hidden_size {config['hidden_size']}, which {heads} attention heads do not divide, "
            "and no head_dim; write head_dim into config.json"
        )
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // heads
    config["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    for key in ("head_dim", "num_key_value_heads"):
        _positive(config, key, folder / "config.json")
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


def _positive(config: dict[str, Any], key: str, where: Path) -> None:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise HeadError(f"{where} has {key} {value!r}, wanted a positive whole number; correct or add the key")


def _aux_layers(target: dict[str, Any], config: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """Layers whose input is captured. The engine's key holds each less one; without it, (2, L//2, L-3)."""
    layers = target["num_hidden_layers"]
    eagle = config.get("eagle_config") or {}
    if not isinstance(eagle, dict):
        raise HeadError(f"{folder} has eagle_config {eagle!r}, wanted an object; correct the head's config.json")
    if eagle.get("use_aux_hidden_state", True) is False:
        return ()
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    if ids is not None and not (isinstance(ids, list) and all(isinstance(i, int) for i in ids)):
        raise HeadError(f"{folder} has aux layer ids {ids!r}, wanted a list of whole numbers; correct config.json")
    default = [2, layers // 2, layers - 3]
    top_level = config.get("eagle_aux_hidden_state_layer_ids")
    if ids is None and top_level is not None and list(top_level) != default:
        raise HeadError(
            f"{folder} has eagle_aux_hidden_state_layer_ids {top_level} at the top level, where the engine does not "
            f"read it (it would capture {default}); add eagle_config.eagle_aux_hidden_state_layer_ids, each id less one"
        )
    captured = default if ids is None else [i + 1 for i in ids]
    rising = all(a < b for a, b in zip(captured, captured[1:], strict=False))
    if not captured or not rising or captured[0] < 1 or captured[-1] >= layers:
        if ids is None:
            raise HeadError(
                f"the default aux layers {default} of a target with {layers} layers are not three different layers; "
                f"write eagle_config.eagle_aux_hidden_state_layer_ids into {folder}/config.json"
            )
        raise HeadError(
            f"{folder} has aux layer ids {list(ids)}, wanted rising ids from 0 to {layers - 2} for a target with "
            f"{layers} layers (the engine captures the input of layer id + 1); use the head trained for this target"
        )
    count = config.get("num_aux_hidden_states")
    if count is not None and count != len(captured):
        raise HeadError(
            f"{folder} has num_aux_hidden_states {count}, but {len(captured)} aux layers are captured; "
            "make num_aux_hidden_states and eagle_config.eagle_aux_hidden_state_layer_ids agree"
        )
    return tuple(captured)


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


def _check_draft_vocabulary(
    target: dict[str, Any], config: dict[str, Any], folder: Path, tensors: dict[str, StoredTensor]
) -> int:
    """draft_vocab_size, lm_head and d2t (target id = draft id + d2t) of an EAGLE-3 head; returns the draft size."""
    vocab = config["vocab_size"]
    if "draft_vocab_size" not in config:
        raise HeadError(
            f"{folder}/config.json has no draft_vocab_size, which the engine reads; "
            f"add it ({vocab} for the whole vocabulary, null to share the target's lm_head)"
        )
    if config["draft_vocab_size"] is not None:
        _positive(config, "draft_vocab_size", folder / "config.json")
    size = config["draft_vocab_size"] or vocab
    if size > vocab:
        raise HeadError(
            f"{folder} has draft_vocab_size {size}, wanted at most the vocabulary of {vocab}; correct config.json"
        )
    shares = config["draft_vocab_size"] is None
    if config.get("tie_word_embeddings") and (size != vocab or shares or "lm_head.weight" in tensors):
        raise HeadError(
            f"{folder} has tie_word_embeddings true, with which the engine drafts with the target's embedding instead "
            "of the head's lm_head; set it to false in the head's config.json"
        )
    if shares and "lm_head.weight" in tensors:
        rows = tensors["lm_head.weight"].shape[0]
        raise HeadError(
            f"{folder} has an lm_head.weight but draft_vocab_size null, with which the engine replaces it by the "
            f"target's; set draft_vocab_size to {rows}"
        )
    if shares and config["hidden_size"] != target["hidden_size"]:
        raise HeadError(
            f"{folder} has draft_vocab_size null and hidden_size {config['hidden_size']}, but the target's lm_head "
            f"wants {target['hidden_size']}; export the head's own lm_head and set draft_vocab_size"
        )
    d2t = tensors.get("d2t")
    if d2t is None:
        if size < vocab:
            raise HeadError(
                f"{folder} drafts from {size} of {vocab} tokens but has no d2t, which maps them to the target's ids; "
                "export d2t (int64, target id minus draft id)"
            )
        return size
    if d2t.dtype not in ("I64", "I32"):
        raise HeadError(f"{folder} has d2t as {d2t.dtype}{_non_finite(d2t)}, wanted whole numbers; export d2t as int64")
    if d2t.shape != (size,):
        raise HeadError(
            f"{folder} has d2t of shape {list(d2t.shape)}, wanted [{size}] by draft_vocab_size; export both together"
        )
    ids = np.arange(size) + _values(d2t)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if outside.size:
        first = int(outside[0])
        raise HeadError(
            f"{folder} has d2t that maps draft id {first} to target id {int(ids[first])}, wanted 0 to {vocab - 1}; "
            "export d2t as target id minus draft id"
        )
    if np.unique(ids).size != size:
        raise HeadError(
            f"{folder} has d2t that maps {size} draft ids to {np.unique(ids).size} target ids, wanted each once; "
            "export d2t as target id minus draft id"
        )
    return size


def _values(tensor: StoredTensor) -> np.ndarray:
    with safe_open(str(tensor.file), framework="np") as file:
        return file.get_tensor(tensor.name)


def _non_finite(tensor: StoredTensor) -> str:
    if tensor.dtype not in ("F16", "F32", "F64"):
        return ""
    count = int((~np.isfinite(_values(tensor))).sum())
    return f" with {count} non-finite values" if count else ""
