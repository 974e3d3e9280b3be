"""The possible meanings of a checkpoint of unknown origin: its aux layers and norm_output. torch is not imported.

What config.json can mean is one question (`read_interpretations`); that its ids are wrong is another
(`likely_mistakes`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from eagle_plugin.heads.description import read_head
from eagle_plugin.heads.files import HeadError, text_config
from eagle_plugin.heads.manifest import read_manifest
from eagle_plugin.heads.target_config import read_target_config
from eagle_plugin.heads.target_table import are_layers, engines_default, last_boundary, sglang_layers


class Interpretation(NamedTuple):
    """One meaning of a checkpoint."""

    aux_layers: tuple[int, ...]  # layers whose INPUT the head reads; () for the last hidden state
    norm_output: bool  # whether the state that is given to the next draft step is the normed one
    origin: str  # who writes a config.json that means this


def read_interpretations(folder: str | Path, target_dir: str | Path) -> list[Interpretation]:
    """Every possible meaning of the aux layers and `norm_output` of a checkpoint, the most likely first.

    There is only one if the head is ours, keeps the engines' default layers, or says the same in both conventions.
    Several must be told apart by measuring. EAGLE-1 and EAGLE-2 heads have one, without layers.

    Raises:
        HeadError: config.json names no layers of this target.
    """
    head, target = read_head(folder), read_target_config(target_dir)
    config, manifest, spec = head.written, head.manifest, head.spec
    if spec is None or not spec.format.reads_aux_layers:
        return [Interpretation((), False, "the last hidden state")]
    # Only vLLM serves the speculators format of P-EAGLE, and it ignores the newer norms there.
    norm = bool(config.get("norm_output", False)) and config.get("speculators_model_type") != "peagle"
    if manifest is not None:
        return [Interpretation(manifest["aux_layers"], norm, "eagle-plugin")]
    layers = text_config(target)["num_hidden_layers"]
    architecture = (target.get("architectures") or ["?"])[0]
    speculators = "speculators_model_type" in config
    # ModelOpt writes an empty list where it trained on the default layers.
    ids, top_level = (listed or None for listed in head.aux_ids)
    default = engines_default(layers)
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
    # The output of the last layer is captured by vLLM in all classes, and by SGLang in some.
    greatest = {"SGLang's ids": last_boundary(architecture, layers), "vLLM's ids": layers, "speculators": layers}
    possible = {
        aux: origin
        for aux, origin in reversed(found)
        if aux and aux[0] >= 0 and aux[-1] <= greatest.get(origin, layers - 1)
    }
    if not possible:
        raise HeadError(
            f"{folder} names aux layers {ids or top_level}, which a target with {layers} layers does not have; "
            "use the head trained for this target"
        )
    meanings = [Interpretation(aux, norm, origin) for aux, origin in reversed(possible.items())]
    # SpecForge 0.2.0 used the key norm_output for another thing: that the head norms what lm_head reads, as all do.
    plain = not any(config.get(key) for key in ("fc_norm", "use_aux_norm", "norm_before_fc"))
    if norm and plain and not speculators:
        meanings += [m._replace(norm_output=False, origin=f"{m.origin}, norm_output as in SpecForge") for m in meanings]
    return meanings


def likely_mistakes(served: Interpretation, folder: str | Path, target_dir: str | Path) -> list[Interpretation]:
    """The aux layers that a head was trained on if its config.json names wrong ones, the most likely first.

    They are as many as those of `served`: the engines' default, and both with every id one too high or one too low (an
    id can count hidden states or layers). There are none for a head of ours, which has its layers on record, and none
    for a head without aux layers.
    """
    if not served.aux_layers or read_manifest(folder) is not None:
        return []
    layers = text_config(read_target_config(target_dir))["num_hidden_layers"]
    default = engines_default(layers)
    found: dict[tuple[int, ...], str] = {default: "the engines' default"}
    for shift, how in ((1, "higher"), (-1, "lower")):
        for aux, whose in ((served.aux_layers, "its ids"), (default, "the engines' default")):
            found.setdefault(tuple(i + shift for i in aux), f"{whose}, one layer {how}")
    return [
        Interpretation(aux, served.norm_output, origin)
        for aux, origin in found.items()
        if aux != served.aux_layers and len(aux) == len(served.aux_layers) and are_layers(aux, layers)
    ]
