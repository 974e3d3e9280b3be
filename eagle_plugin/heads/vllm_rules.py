"""What vLLM makes of a draft head's files: its own names, defaults and shared tensors, checked before a start.

vLLM's classes differ from SGLang's, whose rules are those of `heads.checkpoint`: a head without lm_head gets the
target's, `tie_word_embeddings` is not read, the ids of aux layers are layers, what config.json leaves out has other
defaults, and a tensor without a parameter ends the start. vLLM itself is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eagle_plugin.heads.checkpoint import HeadInfo, check_fits, check_shapes, check_values, size_of
from eagle_plugin.heads.description import HeadDescription, read_head
from eagle_plugin.heads.draft_vocabulary import target_ids
from eagle_plugin.heads.files import DTYPES, HeadError, LeftToEngine, StoredTensor, text_config
from eagle_plugin.heads.kinds import HeadSpec
from eagle_plugin.heads.manifest import compare_target, fewer_levels
from eagle_plugin.heads.other_layouts import windows
from eagle_plugin.heads.suspicions import suspicions
from eagle_plugin.heads.target_config import read_target_config
from eagle_plugin.heads.target_table import engines_default, sglang_layers
from eagle_plugin.heads.vllm_classes import QWEN3, class_config, class_name, counted_aux, misread, refuse_unknown

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def check_head(target_dir: str | Path, head_dir: str | Path, method: str, steps: int | None = None) -> list[str]:
    """Check that vLLM can load the head in `head_dir` for the target in `target_dir`; returns warnings for the log.

    method: of --speculative-config; steps: the levels of the trees.

    Raises:
        HeadError: for the first thing that no worker can serve; `LeftToEngine` for what vLLM's own may.
    """
    return list(describe_head(target_dir, head_dir, method, steps).warnings)


def describe_head(
    target_dir: str | Path, head_dir: str | Path, method: str | None = None, steps: int | None = None
) -> HeadInfo:
    """What `check_head` has checked; method None: the one of the head's kind. Raises as `check_head`."""
    head = read_head(head_dir)
    if head.quantised:
        name = head.quantised[0]
        raise LeftToEngine(f"{head.folder} has {name} as {head.stored[name].dtype}: only plain weights are served")
    if method != "eagle" and _reads_last_state(head):
        raise LeftToEngine(
            f"{head.folder} has use_aux_hidden_state false in eagle_config: heads that read the last hidden state are "
            "served by vLLM's own worker alone"
        )
    spec = check_fits(target_dir, head)
    if method not in (None, spec.method):
        raise HeadError(
            f"{head.folder} holds an {spec.kind} head, but --speculative-config has method {method}; "
            f'use "method": "{spec.method}" with this head'
        )
    target, name, config = read_target_config(target_dir), class_name(head, spec.method), class_config(head)
    vocabulary = text_config(target)["vocab_size"]
    _check_class(head, config, target)
    layers = captured_layers(head, target) if spec.format.reads_aux_layers else ()
    tensors = head.by_parameter()
    size = draft_vocabulary(head, tensors, vocabulary) if spec.format.reads_aux_layers else vocabulary
    wanted = _wanted(config, name, spec, tensors, size, len(layers))
    check_shapes(wanted, tensors, head.folder)
    if layers:
        _check_count(head, config, name, layers)
    _check_windows(head, config)
    if wanted:
        refuse_unknown(head, {*wanted, *spec.format.known_tensors(config), *_known(config)})
    if spec.levels.depth_is_free:
        spec.format.check_tensors(head.config, tensors, head.folder, lambda _: None)  # vLLM adds the biases of q, k, v
    check_values(head)
    used = [tensors[parameter] for parameter in wanted] or [t for t in tensors.values() if t.dtype in DTYPES]
    return HeadInfo(
        architecture=name,
        algorithm=spec.algorithm,
        kind=spec.kind,
        hidden_size=tensors["fc.weight"].shape[0],
        vocab_size=vocabulary,
        draft_vocab_size=size,
        aux_layer_ids=layers,
        num_layers=head.num_layers,
        **size_of(used)._asdict(),
        warnings=(
            *suspicions(head, target_dir),
            *_other_meanings(head, tensors, layers, target),
            *(compare_target(head.manifest, target_dir, head.folder) if head.manifest is not None else ()),
            *misread(head, config, name, tensors),
            *fewer_levels(head.folder, spec, steps),
        ),
    )


def captured_layers(head: HeadDescription, target: dict[str, Any]) -> tuple[int, ...]:
    """The layers of a target (its whole config.json) whose input vLLM captures for an EAGLE-3 head, in their order.

    As its V1 model runner reads config.json: V2 does not read ids in eagle_config (`_other_meanings`). One more
    than the last layer is its output, before the final norm.

    Raises:
        HeadError: the target does not have them, or the head was exported for others.
    """
    if _reads_last_state(head):
        return ()
    count = text_config(target)["num_hidden_layers"]
    in_eagle_config, top_level = head.aux_ids
    ids = top_level or in_eagle_config or engines_default(count)
    layers = tuple(sorted(set(ids)))
    if layers[0] < 0 or layers[-1] > count or len(layers) != len(ids):
        raise HeadError(
            f"{head.folder} has aux layer ids {list(ids)}, wanted different ones from 0 to {count} for a target with "
            f"{count} layers; use the head trained for this target"
        )
    if head.manifest is not None and head.manifest["aux_layers"] != layers:
        raise HeadError(
            f"{head.folder} was trained on the inputs of target layers {list(head.manifest['aux_layers'])}, but vLLM "
            f"would capture {list(layers)} by its config.json; export the head again"
        )
    return layers


def _reads_last_state(head: HeadDescription) -> bool:
    """Whether an EAGLE-3 head reads the target's last hidden state, without an fc, in place of aux hidden states."""
    eagle = head.config.get("eagle_config") or {}
    return head.spec is not None and head.spec.format.reads_aux_layers and not eagle.get("use_aux_hidden_state", True)


def _check_class(head: HeadDescription, config: dict[str, Any], target: dict[str, Any]) -> None:
    """Refuse values with which vLLM's class ends the start; config: `class_config`."""
    if config.get("hidden_act", "silu") != "silu":
        raise HeadError(
            f"{head.folder} has hidden_act {config['hidden_act']!r}, which vLLM's draft MLP cannot do (wanted silu); "
            "train the head with a plain silu MLP"
        )
    speculators, key = head.written.get("speculators_model_type"), "target_hidden_size"
    if speculators is None and head.written.get(key, 1) is None:
        raise HeadError(
            f"{head.folder} has {key} None, but the target's hidden_size is {text_config(target)['hidden_size']}; "
            "remove the key from the head's config.json, or write this number"
        )


def count_aux(target_dir: str | Path, head_dir: str | Path) -> int | None:
    """How many aux layers are captured for an EAGLE-3 head, where vLLM's class takes another number for its fc."""
    head = read_head(head_dir)
    if head.spec is None or not head.spec.format.reads_aux_layers:
        return None
    layers = captured_layers(head, read_target_config(target_dir))
    name, config = class_name(head, head.spec.method), class_config(head)
    return len(layers) if layers and counted_aux(config, name, layers) is not None else None


def draft_vocabulary(head: HeadDescription, tensors: dict[str, StoredTensor], vocabulary: int) -> int:
    """The size of the vocabulary that an EAGLE-3 head drafts from."""
    size: int = head.config.get("draft_vocab_size") or vocabulary
    table = tensors.get("d2t")
    if size > vocabulary:
        raise HeadError(
            f"{head.folder} has draft_vocab_size {size}, wanted at most the vocabulary of {vocabulary}; correct it"
        )
    if table is not None and table.dtype in ("BF16", "F16", "F32"):
        raise LeftToEngine(f"{head.folder} has d2t as {table.dtype}, wanted whole numbers; export d2t as int64")
    if table is not None:
        ids = target_ids(table, size, vocabulary, head.folder)
        if size == vocabulary and (ids != np.arange(size)).any():
            raise HeadError(
                f"{head.folder} has a d2t that reorders the whole vocabulary, for which vLLM has no place; write the "
                f"head again: eagle-plugin export {head.folder} NEW --target TARGET"
            )
    elif size < vocabulary:
        raise HeadError(
            f"{head.folder} drafts from {size} of {vocabulary} tokens but has no d2t, which maps them to the target's "
            "ids; export d2t (int64, target id minus draft id)"
        )
    return size


def _wanted(
    written: dict[str, Any],
    name: str,
    spec: HeadSpec,
    tensors: dict[str, StoredTensor],
    size: int,
    aux: int,
) -> dict[str, tuple[int, ...]]:
    """The tensors that vLLM's class would otherwise leave at random values, by canonical name; empty where config.json
    leaves a size to the engine's default."""
    config = dict(written)
    if any(config.get(key) is None for key in SIZES):
        return {}
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    config["num_key_value_heads"] = config.get("num_key_value_heads") or config["num_attention_heads"]
    config["use_aux_norm"] = False  # only SGLang's name for fc_norm
    wanted = {
        name: shape
        for name, shape in spec.format.wanted_tensors(config, size, aux)
        if not name.endswith(".bias") and name != "lm_head.weight"
    }
    for i in range(config["num_hidden_layers"]):
        if i and (norm := wanted.pop(f"layers.{i}.hidden_norm.weight", None)):  # later layers read the other name
            wanted[f"layers.{i}.input_layernorm.weight"] = norm
        if name in QWEN3:
            wanted |= {f"layers.{i}.self_attn.{part}_norm.weight": (config["head_dim"],) for part in "qk"}
    if "lm_head.weight" in tensors and spec.format.reads_aux_layers:
        wanted["lm_head.weight"] = size, config["hidden_size"]
    return wanted


def _known(config: dict[str, Any]) -> Iterator[str]:
    """Parameters of vLLM's class that a head may leave out or that are left out in silence."""
    yield from ("lm_head.weight", "input_norm.weight")
    for i in range(config["num_hidden_layers"]):
        yield f"layers.{i}.hidden_norm.weight"


def _check_count(head: HeadDescription, config: dict[str, Any], name: str, layers: tuple[int, ...]) -> None:
    """Refuse a num_aux_hidden_states that contradicts the aux layers; one that is missing is set by the plugin."""
    count = counted_aux(config, name, layers)
    if count is not None and config.get("num_aux_hidden_states") is not None:
        raise HeadError(
            f"{head.folder} has num_aux_hidden_states {count}, but vLLM captures the inputs of {len(layers)} layers "
            f"for it, {list(layers)}; make the key and the ids of the aux layers agree"
        )


def _check_windows(head: HeadDescription, config: dict[str, Any]) -> None:
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers") or 0
    if isinstance(kinds, list) and kinds and len(kinds) < layers:
        raise HeadError(
            f"{head.folder} has layer_types for {len(kinds)} of its {layers} layers, wanted one for each; correct "
            "config.json"
        )
    if any(key == "layer_types" for key, _ in windows(config)) and not config.get("sliding_window"):
        raise HeadError(
            f"{head.folder} has layer_types {kinds} and no sliding_window, wanted the number of tokens that such a "
            "layer sees; correct config.json"
        )


def _other_meanings(
    head: HeadDescription, tensors: dict[str, StoredTensor], layers: tuple[int, ...], target: dict[str, Any]
) -> Iterator[str]:
    """What vLLM reads otherwise than the head's trainer may have meant."""
    in_eagle_config, top_level = head.aux_ids
    if layers and in_eagle_config and not top_level and head.manifest is None:
        architecture, count = (target.get("architectures") or ["?"])[0], text_config(target)["num_hidden_layers"]
        meant, default = sglang_layers(architecture, in_eagle_config, count), engines_default(count)
        if {meant, default} != {layers}:
            yield (
                f"{head.folder} names its aux layers in eagle_config alone: vLLM's V1 model runner captures the inputs "
                f"of layers {list(layers)}, its V2 model runner those of {list(default)}, its default, and SGLang "
                f"those of {list(meant)} for the same ids; find out which it was trained on with eagle-plugin check, "
                "and write both keys with eagle-plugin export --aux-layers"
            )
    if layers and "lm_head.weight" not in tensors:
        size, vocabulary = head.config.get("draft_vocab_size"), text_config(target)["vocab_size"]
        if size is not None and size != vocabulary:
            yield (
                f"{head.folder} has no lm_head.weight and drafts from {size} of {vocabulary} tokens, for which vLLM "
                "takes the first rows of the target's lm_head, so that hardly a draft is right; export the head's own"
            )
