"""What a draft head and its trees take in memory, from files and flags alone, before anything is loaded.

A server's own numbers are in its log; what they depend on that no flag says is left out by name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.description import read_head
from eagle_plugin.heads.files import DTYPES, HeadError, StoredTensor, read_config, read_tensors, text_config
from eagle_plugin.runtime.verdict import Cost

INT8_SWITCH = "EAGLE_DRAFT_INT8"
TABLES = ("embed_tokens", "markov_w1")  # of which rows are read, not products made
# Keys of config.json of targets whose cache is not one row of keys and one of values per layer and token.
OTHER_CACHES = ("kv_lora_rank", "linear_num_value_heads", "layers_block_type", "ssm_cfg", "mamba_d_state")


class Launch(NamedTuple):
    """What the engine has made of the flags, as far as memory depends on it."""

    target: str
    head: str | None  # None: an MTP layer of the target drafts
    device: str  # cpu or cuda
    dtype: str  # of the models, torch's name
    cache_bytes: int  # per number of the caches of keys and values
    tokens: int | None  # of the cache, where flags set them
    requests: int | None  # at a time
    caps: Shape | None  # of the trees; None where the plugin would not serve
    vocabulary: int


def costs_of(launch: Launch) -> list[Cost]:
    """What the head takes whoever serves it, and what the plugin's trees take beside it."""
    number = {"float32": 4}.get(launch.dtype, 2)
    if launch.head is None:
        found = [Cost("the MTP layer's weights", None, "they are among those of the target"), _cache(launch)]
        return found + ([_logits(launch)] if launch.caps else [])
    tensors = _tensors(launch.head)
    if tensors is None:
        where = f"{launch.head} is not a folder with safetensors on this disk"
        found = [Cost("the head's weights", None, where), Cost("the head's keys and values", None, where)]
    else:
        weights = sum(math.prod(t.shape) * number for t in tensors if t.dtype in DTYPES)
        weights += sum(math.prod(t.shape) for t in tensors if t.dtype not in DTYPES)
        found = [Cost("the head's weights", weights, "as stored, in the dtype of the server, all ranks together")]
        found += _int8(launch, tensors) if launch.caps else []
        found.append(_cache(launch))
    return found + ([_logits(launch)] if launch.caps else [])


def _tensors(folder: str) -> list[StoredTensor] | None:
    try:
        return list(read_tensors(folder).values())
    except HeadError:
        return None


def _int8(launch: Launch, tensors: Iterable[StoredTensor]) -> list[Cost]:
    """The copies of `draft_weights`, one byte per weight of a linear layer."""
    if launch.device != "cpu" or launch.dtype != "bfloat16" or os.environ.get(INT8_SWITCH, "1") == "0":
        return []
    matrices = [t for t in tensors if len(t.shape) == 2]
    sizes = [math.prod(t.shape) for t in matrices if not any(table in t.name for table in TABLES)]
    return [Cost("int8 copies of the head's linear layers", sum(sizes), f"{INT8_SWITCH}=0 leaves them out")]


def _cache(launch: Launch) -> Cost:
    what = "the head's keys and values"
    config = _config_of(launch.target)
    target = _values_per_token(config)
    if launch.head is None:  # a layer of ordinary attention, of the target's sizes
        what = "the MTP layer's keys and values"
        head = _values_of_layers(config, 1)
    else:
        head = _values_per_token(_config_of_head(launch.head))
    if head is None:
        return Cost(what, None, "its config.json does not say the sizes")
    per_token = head * launch.cache_bytes
    share = f", {head / (head + target):.1%} of the cache of both models" if target else ""
    if launch.tokens:
        return Cost(what, per_token * launch.tokens, f"{launch.tokens:,} tokens of {per_token:,} bytes{share}")
    return Cost(what, None, f"{per_token:,} bytes per token of the cache{share}; the start decides how many tokens")


def _logits(launch: Launch) -> Cost:
    what = "logits of the target for the trees"
    assert launch.caps is not None
    one = launch.caps.width * launch.vocabulary * 4
    if launch.requests is None:
        return Cost(what, None, f"{one:,} bytes per request that runs; the start decides how many run at a time")
    # On a GPU the memory is there all the time, for the largest batch whose graphs are captured.
    held = "for the largest captured batch all the time" if launch.device == "cuda" else "during a round"
    return Cost(
        what,
        one * launch.requests,
        f"at most, {held}: {launch.requests} requests with {launch.caps.width} nodes, float32",
    )


def _config_of(folder: str) -> Mapping[str, Any]:
    try:
        return text_config(read_config(folder)) if Path(folder).is_dir() else {}
    except HeadError:
        return {}


def _config_of_head(folder: str) -> Mapping[str, Any]:
    try:
        return read_head(folder).config
    except HeadError:
        return {}


def _values_per_token(config: Mapping[str, Any]) -> int | None:
    """Numbers of keys and values per token of a model with this config.json; None where it is not known."""
    if any(config.get(key) for key in OTHER_CACHES):
        return None
    return _values_of_layers(config, config.get("num_hidden_layers"))


def _values_of_layers(config: Mapping[str, Any], layers: Any) -> int | None:
    """The same of so many layers with ordinary attention."""
    try:
        heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
        width = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        return 2 * int(layers) * heads * width
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
