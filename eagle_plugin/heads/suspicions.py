"""What the files of a head show before a draft is made: that it will serve, but probably not well. One sentence each.

Nothing here refuses a head. torch is not imported, and of large tensors only a sample of the rows is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eagle_plugin.heads.contents import is_zero, read_rows
from eagle_plugin.heads.description import HeadDescription
from eagle_plugin.heads.draft_vocabulary import read_table
from eagle_plugin.heads.files import HeadError, StoredTensor, read_config, read_tensors, text_config
from eagle_plugin.heads.other_layouts import rope_options

SAMPLE = 128  # rows of an embedding
# Of the values of these rows with the target's. A copy has 1, one that was trained further above 0.9, and one that was
# left at its first random values, or is of another target, about 0.
LEAST_CORRELATION = 0.5
DEFAULT_ROPE_THETA = 10000.0  # of the engines, where a head's config.json has none
WHOLE = ("fc.weight", "lm_head.weight", "norm.weight")  # of which zeros alone cannot be right


def suspicions(head: HeadDescription, target_dir: str | Path) -> list[str]:
    """Why a head that fits its target will probably draft badly, with the likely cause and the fix."""
    tensors = head.by_parameter()
    return [
        *_zeros(head, tensors),
        *_foreign_embedding(head, tensors, Path(target_dir)),
        *_contradicting_tables(head, tensors),
        *_other_rope(head, text_config(read_config(target_dir))),
        *part_of_rotation(head),
        *_leftover_quantisation(head),
    ]


def _zeros(head: HeadDescription, tensors: dict[str, StoredTensor]) -> Iterator[str]:
    zeros = [name for name in WHOLE if name in tensors and is_zero(tensors[name])]
    if zeros:
        yield (
            f"{head.folder} has {' and '.join(zeros)} with zeros alone, so that hardly a draft will be right; its "
            "training never ran or its copy failed: copy the trained head again"
        )


def _foreign_embedding(head: HeadDescription, tensors: dict[str, StoredTensor], target_dir: Path) -> Iterator[str]:
    own = tensors.get("embed_tokens.weight")
    if own is None or len(own.shape) != 2:
        return
    try:
        stored = read_tensors(target_dir).values()
    except HeadError:  # a target without safetensors: the engine loads it from another format
        return
    same = [t for t in stored if t.name.endswith("embed_tokens.weight") and t.shape == own.shape]
    if len(same) != 1:
        return
    rows = np.unique(np.linspace(0, own.shape[0] - 1, SAMPLE).astype(int))
    values = [read_rows(tensor, rows) for tensor in (own, same[0])]
    found = _correlation(*values) if all(v is not None for v in values) else 1.0  # type: ignore[arg-type]
    if found < LEAST_CORRELATION:
        yield (
            f"{head.folder} has an embed_tokens.weight that does not resemble the target's (correlation {found:.2f} "
            f"over {len(rows)} rows, wanted {LEAST_CORRELATION} or more): vLLM drafts with it and SGLang with the "
            "target's; if training left it at random values, remove the tensor, else use the head of this target"
        )


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's, over all values; 0 where one of them is constant."""
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale > 0 else 0.0


def _contradicting_tables(head: HeadDescription, tensors: dict[str, StoredTensor]) -> Iterator[str]:
    offsets, known = tensors.get("d2t"), tensors.get("t2d")
    if offsets is None or known is None or known.dtype != "BOOL":
        return
    ids = read_table(offsets)
    ids = ids + np.arange(len(ids))
    listed = np.flatnonzero(read_table(known))
    if not np.array_equal(np.sort(ids), listed):
        missing = len(np.setdiff1d(ids, listed))
        yield (
            f"{head.folder} has tables of its draft vocabulary that contradict each other: {missing:,} of {len(ids):,} "
            f"tokens of d2t are not in t2d, which has {len(listed):,}; engines read d2t alone: if it is of another "
            "training than lm_head, hardly a draft will be right; copy both tables of the head again"
        )


def _other_rope(head: HeadDescription, target: dict[str, Any]) -> Iterator[str]:
    if head.manifest is not None and "config" in head.manifest:  # as it was trained: `contents.compare_record`
        return
    own, wanted = _rope_theta(head.config), _rope_theta(target)
    if wanted is not None and (own or DEFAULT_ROPE_THETA) != wanted:
        yield (
            f"{head.folder} rotates positions with rope_theta {own or DEFAULT_ROPE_THETA:g}"
            f"{'' if own else ', the default of the engines'}, its target with {wanted:g}; if the head was trained "
            "with the target's, as most are, write that into its config.json"
        )


def part_of_rotation(head: HeadDescription) -> Iterator[str]:
    """A part that one engine rotates and the other does not read."""
    found = rope_options(head.config).get("partial_rotary_factor")
    if found not in (None, 1) and head.config.get("partial_rotary_factor") is None:
        yield (
            f"{head.folder} has partial_rotary_factor {found} inside its rotary options alone: vLLM rotates this part "
            "of each attention head, and SGLang all of it; write the key at the top of config.json too if the head was "
            "trained with it, else remove it"
        )


def dynamic_rotation(head: HeadDescription) -> Iterator[str]:
    """Positions that SGLang alone rotates otherwise."""
    options = rope_options(head.config)
    if options.get("rope_type", options.get("type")) == "dynamic" and "alpha" not in options:
        yield (
            f"{head.folder} rotates positions with the type dynamic, of which SGLang scales the base of all positions, "
            "and neither vLLM nor trainers that of those below max_position_embeddings, so that its drafts are poor; "
            "set the type to default in the head's config.json if its contexts are within that length"
        )


def _rope_theta(config: dict[str, Any]) -> float | None:
    found = rope_options(config).get("rope_theta", config.get("rope_theta"))
    return float(found) if isinstance(found, int | float) else None


def _leftover_quantisation(head: HeadDescription) -> Iterator[str]:
    if head.leftover_quantisation:
        method = head.written["quantization_config"].get("quant_method", "without a quant_method")
        yield (
            f"{head.folder} has a quantization_config ({method}) in config.json, but its weights are plain: an engine "
            "without the plugin reads them as quantised, with scales that are not there, or does not start; remove the "
            "key from the head's config.json"
        )
