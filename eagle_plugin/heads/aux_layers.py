"""The aux layers that SGLang captures for the config.json of an EAGLE-3 head.

Two keys of one name hold the ids, in two conventions: SGLang reads `eagle_config.eagle_aux_hidden_state_layer_ids`
(`target_table.sglang_layers` turns them into layers); vLLM reads a key of the same name at the top level or there, as
the layers themselves. torch is not imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_plugin.heads.files import HeadError, Judge, refuse
from eagle_plugin.heads.target_table import are_layers, last_boundary, sglang_layers

KEY = "eagle_aux_hidden_state_layer_ids"


def captured_layers(
    architecture: str, layers: int, config: dict[str, Any], folder: Path, misread: Judge = refuse
) -> tuple[int, ...]:
    """The layers whose input SGLang captures for this config.json on a target of `layers` layers, in their order.

    misread: gets the sentence about ids that SGLang serves otherwise than they are probably meant.

    Raises:
        HeadError: they are not layers of the target, or config.json contradicts itself.
    """
    if _eagle_config(config, folder).get("use_aux_hidden_state", True) is False:
        return ()
    ids, top_level = read_ids(config, folder)
    if ids == []:
        raise HeadError(
            f"{folder} has eagle_config.{KEY} [], for which the engine captures no layer, wanted the ids of the layers "
            "that the head was trained on; remove the key if they are the engine's default"
        )
    captured = sglang_layers(architecture, ids, layers)
    if ids is None and top_level is not None and tuple(top_level) != captured:
        misread(
            f"{folder} has {KEY} {top_level} at the top level, where the engine does not read it (it would capture "
            f"{list(captured)}); add eagle_config.{KEY}, each id less one"
        )
    last = last_boundary(architecture, layers)
    if not are_layers(captured, layers, 0, last):
        if ids is None:
            raise HeadError(
                f"the default aux layers {list(captured)} of a target with {layers} layers are not three different "
                f"layers; write eagle_config.{KEY} into {folder}/config.json"
            )
        rising = tuple(sorted(set(captured)))
        (misread if len(rising) == len(captured) and are_layers(rising, layers, 0, last) else refuse)(
            f"{folder} has aux layer ids {ids}, for which the engine would capture the inputs of layers "
            f"{list(captured)}, wanted rising ones from 0 to {last} for a target with {layers} layers; "
            "use the head trained for this target"
        )
        captured = rising
    count = config.get("num_aux_hidden_states")
    if count is not None and count != len(captured):
        raise HeadError(
            f"{folder} has num_aux_hidden_states {count}, but {len(captured)} aux layers are captured; "
            f"make num_aux_hidden_states and eagle_config.{KEY} agree"
        )
    return captured


def _eagle_config(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    eagle = config.get("eagle_config") or {}
    if not isinstance(eagle, dict):
        raise HeadError(f"{folder} has eagle_config {eagle!r}, wanted an object; correct the head's config.json")
    return eagle


def read_ids(config: dict[str, Any], folder: Path) -> tuple[list[int] | None, list[int] | None]:
    """The ids in eagle_config and those at the top level.

    Raises:
        HeadError: one of them is not a list of whole numbers.
    """
    both = _eagle_config(config, folder).get(KEY), config.get(KEY)
    for ids in both:
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
            raise HeadError(f"{folder} has aux layer ids {ids!r}, wanted a list of whole numbers; correct config.json")
    return both
