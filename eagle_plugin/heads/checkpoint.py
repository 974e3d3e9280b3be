"""Checking a draft head against its target before any weight is loaded.

The engine's loaders ignore tensors that they do not know and leave parameters that they do not find at random values,
both without a message. So every tensor is compared by name and shape here (`heads.formats`), its values are looked
through for Inf and NaN, and where the head has a record of its export everything is compared with it
(`heads.contents`). torch is not imported.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from eagle_plugin.heads.contents import compare_record, has_digests, scan
from eagle_plugin.heads.description import HeadDescription, described_spec, read_head, refuse_block_drafter
from eagle_plugin.heads.files import (
    DTYPES,
    Algorithm,
    HeadError,
    Judge,
    LeftToEngine,
    StoredTensor,
    read_size,
    refuse,
    text_config,
)
from eagle_plugin.heads.formats import EagleFormat, refuse_mask_without_features
from eagle_plugin.heads.kinds import ALGORITHMS, HEADS, HeadSpec, spec_of_tensors
from eagle_plugin.heads.manifest import compare_target
from eagle_plugin.heads.other_layouts import refuse_other_layout
from eagle_plugin.heads.suspicions import dynamic_rotation, suspicions
from eagle_plugin.heads.target_config import read_target_config

LLAMA4_MLP = 16384
LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"  # SGLang's own
BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class HeadInfo:
    """What the checkpoint of a draft head contains."""

    architecture: str
    algorithm: Algorithm
    kind: str
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int  # vocab_size when the head drafts from the whole vocabulary
    aux_layer_ids: tuple[int, ...]  # target layers whose INPUT is captured: `hidden_states[i]` of transformers
    num_layers: int
    dtype: str
    parameters: int
    bytes: int
    warnings: tuple[str, ...] = ()  # reasons why it serves, but probably not well: one sentence each


def check_head(target_dir: str | Path, head_dir: str | Path, *, algorithm: str, misread: Judge = refuse) -> HeadInfo:
    """Check that stock SGLang can load the head in `head_dir` for the target in `target_dir` and that it fits.

    algorithm is SGLang's name: "EAGLE" (EAGLE-1 and EAGLE-2 heads) or "EAGLE3". misread: gets each sentence about a
    head that SGLang serves, but otherwise than it was trained (default: it is raised). Takes a few milliseconds and the
    time of `contents.scan`, and with eagle_plugin.json beside the head as long as reading the target's tokenizer.json.

    Raises:
        HeadError: for the first thing that does not fit; `LeftToEngine` for what SGLang's own worker may serve.
    """
    if algorithm not in ALGORITHMS:
        raise HeadError(
            f"speculative algorithm is {algorithm}, wanted {' or '.join(ALGORITHMS)}; choose the one of the head"
        )
    raw, head = read_target_config(target_dir), read_head(head_dir)
    target, config, folder = text_config(raw), dict(head.written), head.folder
    refuse_block_drafter(head)
    try:
        refuse_other_layout(head.stored, config, folder)
    except HeadError as error:
        misread(str(error))
    spec = _find_spec(config, folder, algorithm)
    _check_dimensions(target, config, folder, spec.format, misread)
    if head.quantised:
        raise LeftToEngine(
            f"{folder} has {head.quantised[0]} as {head.stored[head.quantised[0]].dtype}, wanted one of "
            f"{', '.join(DTYPES)}; export the head unquantised"
        )
    if head.leftover_quantisation:
        misread(
            f"{folder} has a quantization_config in config.json, but its weights are plain, which SGLang would read as "
            "quantised, with scales that are not there; remove the key from the head's config.json"
        )
    aux = spec.format.find_aux_layers(raw, config, folder, misread)

    tensors = head.by_parameter(spec.format.canonical_name)
    spec = spec_of_tensors(tensors, spec.format.loader) or spec
    draft_vocab = spec.format.check_vocabulary(target, config, folder, tensors, misread)
    wanted = dict(spec.format.wanted_tensors(config, draft_vocab, len(aux)))
    check_shapes(wanted, tensors, folder)
    spec.format.check_tensors(config, tensors, folder, misread)
    used = [tensors[name] for name in wanted]
    if head.manifest is not None:
        _compare_layers(head.manifest, aux, folder)
    check_values(head)
    return HeadInfo(
        architecture=spec.format.loader,
        algorithm=spec.algorithm,
        kind=spec.kind,
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=draft_vocab,
        aux_layer_ids=aux,
        num_layers=config["num_hidden_layers"],
        **size_of(used)._asdict(),
        warnings=(
            *suspicions(head, target_dir),
            *_compare_lengths(target, config, folder),
            *dynamic_rotation(head),
            *_name_unknown(tensors, {*wanted, *spec.format.known_tensors(config)}, spec, folder),
            *(compare_target(head.manifest, target_dir, folder) if head.manifest is not None else ()),
        ),
    )


class _Size(NamedTuple):
    dtype: str  # in which most of the weights are stored, as torch names it
    parameters: int
    bytes: int


def size_of(tensors: Sequence[StoredTensor]) -> _Size:
    """What `HeadInfo` says of these weights together."""
    return _Size(
        DTYPES[Counter(t.dtype for t in tensors).most_common(1)[0][0]],
        sum(prod(t.shape) for t in tensors),
        sum(prod(t.shape) * BYTES[t.dtype] for t in tensors),
    )


def check_fits(target_dir: str | Path, head: HeadDescription) -> HeadSpec:
    """Check what every engine wants of a head, in whatever words its config.json is written; returns its kind.

    The folder holds an EAGLE head with the layers that its config.json says, for a target of this vocabulary and size.

    Raises:
        HeadError: for the first thing that does not fit.
    """
    folder, config, target = head.folder, head.config, text_config(read_target_config(target_dir))
    spec = described_spec(head)
    found, wanted = config.get("num_hidden_layers"), head.num_layers
    if found != wanted:
        raise HeadError(
            f"{folder} has num_hidden_layers {found} in config.json and the weights of {wanted} layer(s); copy the "
            "config.json of the draft head, not the target's"
        )
    for own, of_target in (("vocab_size", "vocab_size"), (head.hidden_size_key, "hidden_size")):
        if config.get(own) is not None and config[own] != target.get(of_target):
            raise HeadError(
                f"{folder} has {own} {config[own]}, but the target's {of_target} is {target.get(of_target)}; "
                "use the head that was trained for this target"
            )
    refuse_mask_without_features(config, head.names, folder)
    return spec


def check_values(head: HeadDescription) -> None:
    """Look through all values for Inf and NaN, and compare the head with the record of its export.

    Raises:
        HeadError: a value is not finite, or not the one that was exported.
    """
    digests = scan(head.stored.values(), digests=has_digests(head.manifest))
    if head.manifest is not None:
        compare_record(head.manifest, digests, head.written, head.folder)


def _find_spec(config: dict[str, Any], folder: Path, algorithm: str) -> HeadSpec:
    """The most general kind of the class in config.json, which must be the class of `algorithm`."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    wanted = next(spec.format.loader for spec in HEADS.values() if spec.algorithm == algorithm)
    spec = spec_of_tensors((), str(name))
    if spec is None:
        raise HeadError(
            f"{folder} has architectures {names}, which is not a Llama draft head, wanted [{wanted!r}]; give the "
            f"head's folder, and rewrite a head of another project: eagle-plugin export {folder} NEW --target TARGET"
        )
    if spec.algorithm != algorithm:
        raise HeadError(
            f"{folder} holds {name}, but --speculative-algorithm {algorithm} wants {wanted}; "
            f"use --speculative-algorithm {spec.algorithm} with this head"
        )
    return spec


def _check_dimensions(
    target: dict[str, Any], config: dict[str, Any], folder: Path, stored: EagleFormat, misread: Judge
) -> None:
    """Compare the sizes in config.json with each other and with the target's; add the engine's defaults to config."""
    if stored.reads_aux_layers and config.get("model_type") == "llama4_text":
        # SGLang's EAGLE-3 layer reads this key for this type; the default is that of transformers.
        config["intermediate_size"] = config.get("intermediate_size_mlp", LLAMA4_MLP)
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        read_size(config, key, folder / "config.json")
    heads = config["num_attention_heads"]
    if config.get("head_dim") is None and config["hidden_size"] % heads:
        raise HeadError(
            f"{folder} has hidden_size {config['hidden_size']}, not a multiple of its {heads} attention heads, "
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
    key = stored.hidden_size_key(config)
    if config[key] != target["hidden_size"]:
        raise HeadError(
            f"{folder} has {key} {config[key]}, but the target's hidden_size is {target['hidden_size']}; "
            "use the head that was trained for this target"
        )
    stored.check_config(config, folder, misread)


def check_shapes(wanted: dict[str, tuple[int, ...]], tensors: dict[str, StoredTensor], folder: Path) -> None:
    """Compare the tensors of a head with those that an engine's class reads.

    Raises:
        HeadError: one is missing or has another shape; `LeftToEngine` where it is stored in another type.
    """
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
            f"which the engine would leave at random values; {fix}"
        )
    for name, shape in wanted.items():
        found = tensors[name]
        if found.shape != shape:
            raise HeadError(
                f"{folder} has {found.name} of shape {list(found.shape)}, wanted {list(shape)} by the sizes in its "
                "config.json and the target's; use the head of this target or correct config.json"
            )
        if found.dtype not in DTYPES:
            raise LeftToEngine(
                f"{folder} has {found.name} as {found.dtype}, wanted one of {', '.join(DTYPES)}; "
                "export the head unquantised"
            )


def _compare_lengths(target: dict[str, Any], config: dict[str, Any], folder: Path) -> list[str]:
    own, wanted = config.get("max_position_embeddings"), target.get("max_position_embeddings")
    if own is None or wanted is None or own >= wanted:
        return []
    found = f"{folder} has max_position_embeddings {own}, below the target's {wanted}"
    if os.environ.get(LONGER, "").lower() in ("1", "true", "yes", "y"):
        return [f"{found}, which {LONGER} lets SGLang raise: drafts of longer texts may be rejected"]
    return [
        f"{found}, with which SGLang does not start unless --context-length is at most {own}; write {wanted} into the "
        "head's config.json"
    ]


def _name_unknown(tensors: dict[str, StoredTensor], known: set[str], spec: HeadSpec, folder: Path) -> list[str]:
    unknown = [t.name for name, t in tensors.items() if name not in known and not name.endswith(".inv_freq")]
    if not unknown:
        return []
    more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
    return [
        f"{folder} has tensors that an {spec.kind} head does not have and the engine drops: "
        f"{', '.join(unknown[:3])}{more}; if the head was trained with them, its drafts are poor without them"
    ]


def _compare_layers(manifest: dict[str, Any], aux: tuple[int, ...], folder: Path) -> None:
    if manifest["aux_layers"] != aux:
        raise HeadError(
            f"{folder} was trained on the inputs of target layers {list(manifest['aux_layers'])}, but the engine would "
            f"capture {list(aux)} by its config.json; export the head again"
        )
