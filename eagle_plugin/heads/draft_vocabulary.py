"""Checking the draft vocabulary of an EAGLE-3 checkpoint: draft_vocab_size, lm_head, d2t. torch is not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from eagle_plugin.heads.files import HeadError, Judge, LeftToEngine, StoredTensor, read_size, refuse


def check_draft_vocabulary(
    target: dict[str, Any],
    config: dict[str, Any],
    folder: Path,
    tensors: dict[str, StoredTensor],
    misread: Judge = refuse,
) -> int:
    """draft_vocab_size, lm_head and d2t (target id = draft id + d2t) of an EAGLE-3 head, as SGLang reads them.

    misread: gets the sentence about an lm_head that SGLang replaces. Returns the draft size.

    Raises:
        HeadError: they contradict each other; `LeftToEngine` where a table names a token twice.
    """
    vocab = config["vocab_size"]
    if "draft_vocab_size" not in config:
        raise HeadError(
            f"{folder}/config.json has no draft_vocab_size, which the engine reads; "
            f"add it ({vocab} for the whole vocabulary, null to share the target's lm_head)"
        )
    if config["draft_vocab_size"] is not None:
        read_size(config, "draft_vocab_size", folder / "config.json")
    size = config["draft_vocab_size"] or vocab
    if size > vocab:
        raise HeadError(
            f"{folder} has draft_vocab_size {size}, wanted at most the vocabulary of {vocab}; correct config.json"
        )
    shares = config["draft_vocab_size"] is None
    if config.get("tie_word_embeddings") and (size != vocab or shares or "lm_head.weight" in tensors):
        # With fewer rows in d2t than in the embedding the engine fails at the first draft beyond them.
        (misread if size == vocab else refuse)(
            f"{folder} has tie_word_embeddings true, with which the engine drafts with the target's embedding instead "
            "of the head's lm_head; set it to false in the head's config.json"
        )
    if shares and "lm_head.weight" in tensors:
        rows = tensors["lm_head.weight"].shape[0]
        misread(
            f"{folder} has an lm_head.weight but draft_vocab_size null, with which the engine replaces it by the "
            f"target's; set draft_vocab_size to {rows}"
        )
    if shares and config["hidden_size"] != target["hidden_size"]:
        raise HeadError(
            f"{folder} has draft_vocab_size null and hidden_size {config['hidden_size']}, but the target's lm_head "
            f"wants {target['hidden_size']}; export the head's own lm_head and set draft_vocab_size"
        )
    d2t = tensors.get("d2t")
    if d2t is None:
        if size < vocab:
            raise HeadError(
                f"{folder} drafts from {size} of {vocab} tokens but has no d2t, which maps them to the target's ids; "
                "export d2t (int64, target id minus draft id)"
            )
        return size
    target_ids(d2t, size, vocab, folder)
    return size


def target_ids(d2t: StoredTensor, size: int, vocab: int, folder: Path) -> np.ndarray:
    """The target's id of each of `size` draft tokens, [size] int64.

    Raises:
        HeadError: the table is of another size or type, or names no token of the target; `LeftToEngine` where it names
            one twice.
    """
    if d2t.dtype not in ("I64", "I32"):
        raise HeadError(f"{folder} has d2t as {d2t.dtype}{_non_finite(d2t)}, wanted whole numbers; export d2t as int64")
    if d2t.shape != (size,):
        raise HeadError(
            f"{folder} has d2t of shape {list(d2t.shape)}, wanted [{size}] by draft_vocab_size; export both together"
        )
    ids: np.ndarray = np.arange(size) + read_table(d2t)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if outside.size:
        first = int(outside[0])
        raise HeadError(
            f"{folder} has d2t that maps draft id {first} to target id {int(ids[first])}, wanted 0 to {vocab - 1}; "
            "export d2t as target id minus draft id"
        )
    if np.unique(ids).size != size:
        # Siblings in a draft tree must be different tokens, or the rule of verification is not exact.
        raise LeftToEngine(
            f"{folder} has d2t that maps {size} draft ids to {np.unique(ids).size} target ids, wanted each once; "
            "export d2t as target id minus draft id"
        )
    return ids


def read_table(tensor: StoredTensor) -> np.ndarray:
    """The values of d2t or t2d."""
    with safe_open(str(tensor.file), framework="np") as file:
        return file.get_tensor(tensor.name)


def _non_finite(tensor: StoredTensor) -> str:
    if tensor.dtype not in ("F16", "F32", "F64"):
        return ""
    count = int((~np.isfinite(read_table(tensor))).sum())
    return f" with {count} non-finite values" if count else ""
