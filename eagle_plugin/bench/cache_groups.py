"""How many blocks of vLLM's cache a block of tokens takes: one per group of layers with the same kind of attention,
which takes blocks of its own from one pool."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from eagle_plugin.heads.files import HeadError, read_config, text_config
from eagle_plugin.heads.target_config import groups_by_kind, layer_kinds

FULL = "full_attention"


def cache_groups(target: Path, head: Path | None) -> int:
    """The groups of a target with its head's layers; 1 where all layers are of one kind, or the files do not say it.

    A window holds fewer blocks than the context, so a cache of as many blocks per group is never too small.
    """
    try:
        layers = Counter(layer_kinds(target))
        if len(layers) < 2:  # a head's layers have the target's window too
            return 1
        if head is not None:
            own = read_config(head)
            # Blocks of another size are a kind of their own.
            widths = {_width(text_config(read_config(target))), _width(own)} - {None}
            kind = FULL if len(widths) < 2 else "head"
            layers[kind] += int(own.get("num_hidden_layers") or 1)
    except (HeadError, TypeError, ValueError):
        return 1  # the engine says what is wrong with the files
    return sum(groups_by_kind(layers).values())


def _width(config: dict[str, Any]) -> int | None:
    """Numbers of the keys of a token in one layer; None if unknown."""
    heads = config.get("num_attention_heads")
    width = config.get("head_dim") or (heads and config.get("hidden_size", 0) // heads)
    groups = config.get("num_key_value_heads") or heads
    return groups * width if groups and width else None
