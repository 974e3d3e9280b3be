"""Layouts of public heads that no engine class for Llama heads computes, told by names of tensors and keys.

The engines' loaders drop tensors that they do not know. A head of such a layout would be served without a part that it
was trained with, or be refused for tensors that it never had. torch is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eagle_plugin.heads.files import HeadError


class Part(NamedTuple):
    """A part of a head that a Llama layer does not have."""

    names: re.Pattern[str]  # of its tensors
    what: str
    origin: str  # who writes it


# The first that matches names the layout, so parts that come along with another one come after it.
PARTS = tuple(
    Part(re.compile(names), what, origin)
    for names, what, origin in (
        (r"(^|\.)(eh_proj|enorm|hnorm|pre_fc_norm_\w+)\.|^mtp[._]", "a layer for multi-token prediction", "MTP heads"),
        (r"\.(kv_a_proj_with_mqa|kv_b_proj|q_a_proj|q_b_proj)\.", "multi-head latent attention", "DeepSeek, Kimi K2"),
        (r"\.experts?\.|\.mlp\.(gate|router)\.|\.mlp\.(gate|up|down)_weight$", "a mixture of experts", "SpecForge"),
        (r"\.[qk]_norm\.", "a norm of queries or keys", "Qwen3 layers"),
        (r"\.self_attn\.sinks$", "attention sinks", "gpt-oss layers"),
        (r"(^|\.)(parallel_draft_heads|medusa_\w+)\.", "a Medusa head after the EAGLE layer", "ModelOpt"),
        (r"(^|\.)(markov|confidence|selector)_?\w*\.", "a part of a block drafter", "DSpark, DFlash"),
        (r"^(model\.)?hidden_norm\.", "one norm between fc and the layers", "SpecForge's MoE heads"),
        (
            r"^(embed(ding)?_layernorm|(pre_)?lm_head_layernorm|hidden_layernorm)\.",
            "a norm around the layer of an EAGLE-2 head",
            "HASS, speculators",
        ),
        (r"^(fusion_fc|transformer)\.", "names of an older format", "speculators' EAGLE-1"),
        (r"^(model\.)?(midlayer|layers\.0)\.\d+\.", "numbered first layers", "ModelOpt's LlamaForCausalLMEagle3Deep"),
        (r"\.(qkv|gate_up)_proj\.", "projections in one matrix", "heads saved from an engine"),
        (r"\.lora_[AB]\.", "LoRA weights", "unmerged adapters"),
    )
)
# ModelOpt's keys of eagle_config, with the value that the engines' classes compute without reading the key.
SWITCHES = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
}


def refuse_other_layout(names: Iterable[str], config: Mapping[str, Any], folder: Path) -> None:
    """Refuse a head with a part that no engine class for Llama heads computes.

    names: of its tensors, as stored or canonical; config: its config.json, with the keys of its layers at the top.

    Raises:
        HeadError: for the first such part.
    """
    names = list(names)
    for part in PARTS:
        found = next((name for name in names if part.names.search(name)), None)
        if found is not None:
            raise HeadError(
                f"{folder} has {found}, which is {part.what} ({part.origin}), wanted only the tensors of Llama layers, "
                "because the engines' classes for EAGLE heads compute nothing else; use or train such a head"
            )
    for key, value in _switches(config):
        raise HeadError(
            f"{folder} has {key} {value}, wanted {_computed(key)}, because the engines' classes for EAGLE heads do not "
            "read the key; use or train a head without this option"
        )


def _switches(config: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """The keys whose value changes what the head computes, where the engines' classes do not read them."""
    eagle = config.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    for key, computed in SWITCHES.items():
        if eagle.get(key) is (not computed):
            yield f"eagle_config.{key}", eagle[key]
    step = eagle.get("parallel_draft_step")
    if step is not None and step != 1:
        yield "eagle_config.parallel_draft_step", step
    if config.get("use_sliding_window"):
        yield "use_sliding_window", True
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
        yield "layer_types", kinds


def _computed(key: str) -> Any:
    if key == "layer_types":
        return "full_attention in every layer"
    return SWITCHES.get(key.removeprefix("eagle_config."), 1 if key.endswith("step") else False)


def rope_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the rotary embedding in a config.json, under either name."""
    found = config.get("rope_parameters") or config.get("rope_scaling")
    return found if isinstance(found, dict) else {}


def rope_sections(config: Mapping[str, Any]) -> list[int] | None:
    """The parts of a head's dimension that rotate by time, height and width of an image; None for text alone."""
    return rope_options(config).get("mrope_section")
