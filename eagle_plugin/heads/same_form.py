"""Whether a head can take another one's place in a running server: the same model with other weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_plugin.heads.description import HeadDescription, read_head
from eagle_plugin.heads.files import DTYPES, HeadError, StoredTensor

# Of config.json: what tells where a head came from, and what no engine reads of a head.
ORIGIN = {"_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype"}
UNREAD = {"initializer_range", "use_cache", "attention_dropout", "pretraining_tp"}
UNREAD_TENSORS = {"t2d"}  # the draft vocabulary once more: engines read d2t


def check_same_form(present: str | Path, new: str | Path) -> None:
    """Compare config.json, and shapes and dtypes of the parameters of two heads, whatever names their trainers wrote.

    Raises:
        HeadError: they differ; the message names the first difference and says to start the server again.
    """
    fix = "start the server with the new head instead"
    heads = [read_head(folder) for folder in (present, new)]
    old_config, new_config = (_compared(head.written) for head in heads)
    for key in sorted(old_config.keys() | new_config.keys()):
        if old_config.get(key) != new_config.get(key):
            raise HeadError(
                f"{new} has {key} {new_config.get(key)!r} in config.json, wanted {old_config.get(key)!r} as the served "
                f"head {present}; {fix}"
            )
    old, found = (_parameters(head) for head in heads)
    for name in sorted(old.keys() | found.keys()):
        one, other = old.get(name), found.get(name)
        if one is None or other is None or one.shape != other.shape or not _same_dtype(one.dtype, other.dtype):
            shown = ["no such tensor" if x is None else f"{list(x.shape)} {x.dtype}" for x in (other, one)]
            raise HeadError(f"{new} has {shown[0]} for {name}, wanted {shown[1]} as {present}; {fix}")


def _parameters(head: HeadDescription) -> dict[str, StoredTensor]:
    return {name: tensor for name, tensor in head.by_parameter().items() if name not in UNREAD_TENSORS}


def _same_dtype(one: str, other: str) -> bool:
    """Engines load weights as the dtype in which they compute, whatever they are stored in."""
    return one == other or {one, other} <= DTYPES.keys()


def _compared(config: dict[str, Any]) -> dict[str, Any]:
    """Without what does not count and the options that are off, which may be left out; a token id of 0 is neither."""
    return {key: value for key, value in config.items() if key not in ORIGIN | UNREAD and value is not False}
