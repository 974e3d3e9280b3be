"""The aux layers of an EAGLE-3 checkpoint: which the engine captures, and which the head can have been trained on.

Two keys of one name hold the ids, in two conventions: SGLang reads `eagle_config.eagle_aux_hidden_state_layer_ids`
(`targets.sglang_layers` turns them into layers), vLLM a key of the same name at the top level or there, as the layers
themselves. torch is not imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from eagle_plugin.heads.files import HeadError, canonical_name, read_config, read_tensors, text_config
from eagle_plugin.heads.manifest import read_manifest
from eagle_plugin.heads.targets import sglang_layers

KEY = "eagle_aux_hidden_state_layer_ids"


class Reading(NamedTuple):
    """One way to understand a checkpoint."""

    aux_layers: tuple[int, ...]  # layers whose INPUT the head reads; () for its last hidden state
    norm_output: bool  # whether the state that is handed on to the next draft step is the normed one
    origin: str  # who writes a config.json that means this


def captured_layers(architecture: str, layers: int, config: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """The layers whose input SGLang captures for this config.json on a target of `layers` layers.

    Raises:
        HeadError: they are not layers of the target, or config.json contradicts itself.
    """
    if _eagle_config(config, folder).get("use_aux_hidden_state", True) is False:
        return ()
    ids, top_level = _ids(config, folder)
    captured = sglang_layers(architecture, ids, layers)
    if ids is None and top_level is not None and tuple(top_level) != captured:
        raise HeadError(
            f"{folder} has {KEY} {top_level} at the top level, where the engine does not read it (it would capture "
            f"{list(captured)}); add eagle_config.{KEY}, each id less one"
        )
    rising = all(a < b for a, b in zip(captured, captured[1:], strict=False))
    if not captured or not rising or captured[0] < 1 or captured[-1] >= layers:
        if ids is None:
            raise HeadError(
                f"the default aux layers {list(captured)} of a target with {layers} layers are not three different "
                f"layers; write eagle_config.{KEY} into {folder}/config.json"
            )
        raise HeadError(
            f"{folder} has aux layer ids {ids}, for which the engine would capture the inputs of layers "
            f"{list(captured)}, wanted rising ids from 0 to {layers - 2} for a target with {layers} layers; "
            "use the head trained for this target"
        )
    count = config.get("num_aux_hidden_states")
    if count is not None and count != len(captured):
        raise HeadError(
            f"{folder} has num_aux_hidden_states {count}, but {len(captured)} aux layers are captured; "
            f"make num_aux_hidden_states and eagle_config.{KEY} agree"
        )
    return captured


def read_aux_candidates(folder: str | Path, target_dir: str | Path) -> list[Reading]:
    """Every way to understand the aux layers and `norm_output` of a checkpoint, the likeliest first.

    One reading is certain: the head is ours, keeps the engines' default layers, or says the same in both conventions.
    Several must be told apart by measuring. EAGLE-1 and EAGLE-2 heads have one, without layers.

    Raises:
        HeadError: config.json names no layers of this target.
    """
    folder = Path(folder)
    config, target = read_config(folder), read_config(target_dir)
    manifest = read_manifest(folder)
    if "layers.0.hidden_norm.weight" not in {canonical_name(name, "EAGLE3") for name in read_tensors(folder)}:
        return [Reading((), False, "the last hidden state")]
    # vLLM, which alone serves it, knows no newer norms for this format.
    norm = bool(config.get("norm_output", False)) and config.get("speculators_model_type") != "peagle"
    if manifest is not None:
        return [Reading(manifest["aux_layers"], norm, "eagle-plugin")]
    layers = text_config(target)["num_hidden_layers"]
    architecture = (target.get("architectures") or ["?"])[0]
    speculators = "speculators_model_type" in config
    ids, top_level = _ids(config, folder)
    default = (2, layers // 2, layers - 3)
    found: list[tuple[tuple[int, ...], str]]
    if speculators:
        found = [(tuple(top_level or default), "speculators")]
    elif ids is None and top_level in (None, list(default)):
        found = [(default, "the engines' default")]
    elif ids is None:
        found = [
            (tuple(top_level or ()), "vLLM's ids"),
            (sglang_layers(architecture, top_level, layers), "SGLang's ids"),
        ]
    else:
        as_is = tuple(top_level or ids)
        found = [(sglang_layers(architecture, ids, layers), "SGLang's ids"), (as_is, "vLLM's ids")]
    possible = {aux: origin for aux, origin in reversed(found) if aux and aux[0] >= 0 and aux[-1] < layers}
    if not possible:
        raise HeadError(
            f"{folder} names aux layers {ids or top_level}, which a target with {layers} layers does not have; "
            "use the head trained for this target"
        )
    readings = [Reading(aux, norm, origin) for aux, origin in reversed(possible.items())]
    # SpecForge 0.2.0 wrote norm_output for another thing: that the head norms what lm_head reads, as all do.
    plain = not any(config.get(key) for key in ("fc_norm", "use_aux_norm", "norm_before_fc"))
    if norm and plain and not speculators:
        readings += [r._replace(norm_output=False, origin=f"{r.origin}, norm_output as in SpecForge") for r in readings]
    return readings


def _eagle_config(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    eagle = config.get("eagle_config") or {}
    if not isinstance(eagle, dict):
        raise HeadError(f"{folder} has eagle_config {eagle!r}, wanted an object; correct the head's config.json")
    return eagle


def _ids(config: dict[str, Any], folder: Path) -> tuple[list[int] | None, list[int] | None]:
    """The ids in eagle_config and those at the top level."""
    both = _eagle_config(config, folder).get(KEY), config.get(KEY)
    for ids in both:
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
            raise HeadError(f"{folder} has aux layer ids {ids!r}, wanted a list of whole numbers; correct config.json")
    return both
