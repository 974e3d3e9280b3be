"""Reads config.json of a target as draft heads are compared with it. torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_plugin.heads.files import HeadError, read_config, read_size, text_config

SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")  # of the language model
# With one of them a config.json without layer_types may be of a class that gives its layers several kinds of attention.
PATTERN_KEYS = ("sliding_window", "attention_chunk_size", "full_attention_interval")


def read_target_config(folder: str | Path) -> dict[str, Any]:
    """Return config.json of a target, in which `text_config` finds every one of SIZES.

    A checkpoint may leave out what is the default of its class (Gemma 3 leaves out vocab_size): transformers knows it.

    Raises:
        HeadError: config.json cannot be read, a size is no positive whole number, or architectures is no list of names.
    """
    config = read_config(folder)
    where = Path(folder) / "config.json"
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise HeadError(f"{where} has architectures {names!r}, wanted a list with the name of the target's class")
    missing = [key for key in SIZES if text_config(config).get(key) is None]
    if missing:
        defaults = _of_class(folder, missing)
        inner = config.get("text_config")
        config = {**config, "text_config": {**inner, **defaults}} if isinstance(inner, dict) else config | defaults
    for key in SIZES:
        read_size(text_config(config), key, where)
    return config


def groups_by_kind(layers: Mapping[str, int]) -> dict[str, int]:
    """How many groups of caches vLLM makes of each kind of layers; layers: how many there are of each kind.

    vLLM 0.32 and 0.33 put the layers of a target with several kinds of attention into groups of one size
    (`_get_kv_cache_groups_uniform_page_size`). Layers that follow each other are of different groups of their kind.
    """
    least, most = min(layers.values()), max(layers.values())
    size = most if most < 1.5 * least else least
    return {kind: -(-count // size) for kind, count in layers.items()}


def layer_kinds(folder: str | Path) -> list[str]:
    """The kind of attention of every layer, as transformers names them; [] where all have full attention or one window.

    Raises:
        HeadError: config.json cannot be read.
    """
    config = text_config(read_config(folder))
    kinds = config.get("layer_types")
    # A config.json without a size has what differs from its class alone, as Gemma 3's.
    if not kinds and (any(map(config.get, PATTERN_KEYS)) or None in map(config.get, SIZES)):
        kinds = _of_class(folder, ["layer_types"]).get("layer_types")
    return list(kinds or [])


def refuse_scaled_embedding(target: dict[str, Any], folder: Path) -> None:
    """Raise HeadError for a target for which no block drafter is trained; target: its whole config.json."""
    kind = str(text_config(target).get("model_type"))
    if kind.startswith("gemma4"):
        raise HeadError(
            f"{folder} has model_type {kind}, for which no block drafter is trained: SGLang gives it the target's "
            "embeddings times the root of hidden_size, and vLLM without this factor; train an EAGLE-3 head"
        )


def _of_class(folder: str | Path, keys: list[str]) -> dict[str, Any]:
    """What the class of this target's config has for keys that its file leaves out; {} where transformers has no such
    class."""
    try:
        from transformers import AutoConfig

        found = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    except Exception:  # of as many kinds as there are classes; the sentence about the missing key says what to do
        return {}
    return {key: getattr(found, key, None) for key in keys}
