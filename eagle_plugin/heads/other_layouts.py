"""Layouts of public heads that SGLang's class for Llama heads does not compute, told by names of tensors and keys.

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
    served: str  # by whom it is computed nevertheless, "" for nobody


# The first that matches names the layout, so parts that come along with another one come after it.
PARTS = tuple(
    Part(re.compile(names), what, origin, served)
    for names, what, origin, served in (
        (
            r"(^|\.)(eh_proj|enorm|hnorm|pre_fc_norm_\w+)\.|^mtp[._]",
            "a layer for multi-token prediction",
            "MTP heads",
            'the engines draft with such layers of a target by methods of their own (vLLM: "method": "mtp")',
        ),
        (
            r"\.(kv_a_proj_with_mqa|kv_b_proj|q_a_proj|q_b_proj)\.",
            "multi-head latent attention",
            "DeepSeek, Kimi K2",
            "both engines have a class Eagle3DeepseekV2ForCausalLM for such heads, and serve them without the plugin",
        ),
        (
            r"\.experts?\.|\.mlp\.(gate|router)\.|\.mlp\.(gate|up|down)_weight$",
            "a mixture of experts",
            "SpecForge",
            "",
        ),
        (
            r"\.[qk]_norm\.",
            "a norm of queries or keys",
            "Qwen3 layers",
            "vLLM has a class Eagle3Qwen3ForCausalLM for such heads, SGLang has none",
        ),
        (r"\.self_attn\.sinks$", "attention sinks", "gpt-oss layers", ""),
        (r"(^|\.)(parallel_draft_heads|medusa_\w+)\.", "a Medusa head after the EAGLE layer", "ModelOpt", ""),
        (r"(^|\.)(markov|confidence|selector)_?\w*\.", "a part of a block drafter", "DSpark, DFlash", ""),
        (r"^(model\.)?hidden_norm\.", "one norm between fc and the layers", "SpecForge's MoE heads", ""),
        (
            r"^(embed(ding)?_layernorm|(pre_)?lm_head_layernorm|hidden_layernorm)\.",
            "a norm around the layer of an EAGLE-2 head",
            "HASS, speculators",
            "",
        ),
        (r"^(fusion_fc|transformer)\.", "names of an older format", "speculators' EAGLE-1", ""),
        (
            r"^(model\.)?(midlayer|layers\.0)\.\d+\.",
            "numbered first layers",
            "ModelOpt's LlamaForCausalLMEagle3Deep",
            "",
        ),
        (r"\.(qkv|gate_up)_proj\.", "projections in one matrix", "heads saved from an engine", ""),
        (r"\.lora_[AB]\.", "LoRA weights", "unmerged adapters", ""),
    )
)
# ModelOpt's keys of eagle_config, with the value that the engines' classes compute without reading the key.
SWITCHES = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
}
SLIDING = "sliding_attention"  # of layer_types


def refuse_other_layout(names: Iterable[str], config: Mapping[str, Any], folder: Path) -> None:
    """Refuse a head with a part that SGLang's class for Llama heads does not compute.

    names: of its tensors, as stored or canonical; config: its config.json, with the keys of its layers at the top.

    Raises:
        HeadError: for the first such part.
    """
    names = list(names)
    if (found := find_part(names)) is not None:
        name, part = found
        why = part.served or "because no class for EAGLE heads computes anything else; use or train such a head"
        raise HeadError(
            f"{folder} has {name}, which is {part.what} ({part.origin}), wanted only the tensors of Llama layers"
            f"{'; ' if part.served else ', '}{why}"
        )
    unread = windows(config) if any("hidden_norm" in name for name in names) else all_windows(config)
    for key, value in (*switches(config), *unread):
        raise HeadError(
            f"{folder} has {key} {value}, wanted {computed(key)}, because {_reader(key)}; use or train a head without "
            "this option"
        )


def find_part(names: Iterable[str]) -> tuple[str, Part] | None:
    """The first part that a Llama layer does not have, with the name of one of its tensors."""
    names = list(names)
    found = ((next(filter(part.names.search, names), None), part) for part in PARTS)
    return next(((name, part) for name, part in found if name is not None), None)


def switches(config: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """The keys whose value changes what the head computes, where the engines' classes do not read them."""
    eagle = config.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    for key, wanted in SWITCHES.items():
        if eagle.get(key) is (not wanted):
            yield f"eagle_config.{key}", eagle[key]
    step = eagle.get("parallel_draft_step")
    if step is not None and step != 1:
        yield "eagle_config.parallel_draft_step", step


def window_of(config: Mapping[str, Any]) -> int | None:
    """The number of keys that each row of an EAGLE-3 head sees, its own and the last before it; None: all of them, or
    not as many in all layers. As vLLM's classes read config.json."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    is_sliding = isinstance(kinds, list) and bool(kinds) and all(kind == SLIDING for kind in kinds)
    return window if is_sliding and type(window) is int and window > 0 else None


def windows(config: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """The keys of windows that neither the modules here nor the plugin's class for SGLang computes."""
    return () if window_of(config) is not None else all_windows(config)


def all_windows(config: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """The keys that let a layer of the head see the last tokens alone: vLLM's classes read layer_types."""
    if config.get("use_sliding_window"):
        yield "use_sliding_window", True
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
        yield "layer_types", kinds


def _reader(key: str) -> str:
    if key == "layer_types":
        return (
            "SGLang's class for EAGLE heads does not read the key, and the plugin's reads one window of all layers "
            "(sliding_window) of an EAGLE-3 head"
        )
    return "the engines' classes for EAGLE heads do not read the key"


def computed(key: str) -> Any:
    """What the engines' classes compute in place of what this key says."""
    if key == "layer_types":
        return "full_attention in every layer, or one window in all"
    return SWITCHES.get(key.removeprefix("eagle_config."), 1 if key.endswith("step") else False)


def rope_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the rotary embedding in a config.json, under either name."""
    found = config.get("rope_parameters") or config.get("rope_scaling")
    return found if isinstance(found, dict) else {}


def partial_rotation(config: Mapping[str, Any]) -> float | None:
    """The part of a head's dimension that config.json rotates, under either name; None: all of it."""
    found = [values.get("partial_rotary_factor") for values in (config, rope_options(config))]
    return next((value for value in found if value not in (None, 1)), None)


def rope_sections(config: Mapping[str, Any]) -> list[int] | None:
    """The parts of a head's dimension that rotate by time, height and width of an image; None for text alone."""
    return rope_options(config).get("mrope_section")


def without_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json for a target of text, whose tokens have one place in time, height and width: the same rotation."""
    changed = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        options = config.get(key)
        if isinstance(options, dict) and "mrope_section" in options:
            kept = {k: v for k, v in options.items() if k not in ("mrope_section", "mrope_interleaved")}
            changed[key] = {k: "default" if v == "mrope" else v for k, v in kept.items()}
    return changed
