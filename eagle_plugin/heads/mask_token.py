"""The token that P-EAGLE and block drafters read in place of an unknown one: an id that no text contains."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_plugin.heads.files import HeadError, read_json, text_config
from eagle_plugin.heads.target_config import read_target_config

RESERVED = re.compile(r"reserved|unused|extra_|placeholder|dummy|<SPECIAL_\d+>", re.IGNORECASE)
LEAST_SCALE = 0.1  # of a mask token's embedding, over that of the median row: rows of padding are often zero


def mask_token_candidates(target_dir: str | Path) -> list[int]:
    """Ids that a text should not contain, best first: without a token, reserved tokens, other unused special tokens.

    Tokens of the chat template and those that config.json names (BOS, EOS, PAD) are left out. A corpus can still
    contain one of the special tokens: take the first candidate that does not occur in it.

    Raises:
        HeadError: the target has no tokenizer.json.
    """
    folder = Path(target_dir)
    vocab_size = text_config(read_target_config(folder))["vocab_size"]
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise HeadError(
            f"{folder} has no tokenizer.json to search for an unused token; name the mask token's id yourself"
        )
    tokenizer = read_json(path)
    added: list[dict[str, Any]] = tokenizer.get("added_tokens") or []
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    # Unigram models list [token, score] pairs whose index is the id.
    known = set(vocabulary.values()) if isinstance(vocabulary, dict) else set(range(len(vocabulary)))
    known |= {token["id"] for token in added}
    taken, text = _named_ids(folder), _template(folder)
    special = [
        token
        for token in sorted(added, key=lambda token: -token["id"])
        if token.get("special")
        and token["id"] < vocab_size
        and token["id"] not in taken
        and token["content"] not in text
    ]
    reserved = [token["id"] for token in special if RESERVED.search(token["content"])]
    empty = [i for i in range(vocab_size - 1, -1, -1) if i not in known and i not in taken]
    return empty + reserved + [token["id"] for token in special if token["id"] not in reserved]


def choose_mask_token(target_dir: str | Path, used: set[int]) -> int:
    """The best candidate that is not in `used`.

    Raises:
        HeadError: there is none.
    """
    for candidate in mask_token_candidates(target_dir):
        if candidate not in used:
            return candidate
    raise HeadError(
        f"{target_dir} has no unused token for the mask (no id without a token, no special token outside its "
        "chat template and the draft vocabulary; for a block drafter none with an embedding near zero); name a token "
        "that never occurs, or train an EAGLE-3 head"
    )


def mask_token_of_new(
    target_dir: Path, vocab_size: int, draft_ids: Sequence[int], named: int | None, embedding: Tensor | None = None
) -> int:
    """The mask token of a new head that drafts from these target ids: the one that is named, or the best unused one.

    embedding [V, H]: of the target, where the row of the mask is all that a masked row reads. From a row near zero the
    queries of the first layer are zero at every position, so that all levels of a block begin alike; with one layer
    they stay so.

    Raises:
        HeadError: the named one is not of the target or has an embedding near zero, or none is unused.
    """
    empty = set() if embedding is None else _rows_near_zero(embedding)
    if named is None:
        named = choose_mask_token(target_dir, empty | (set(draft_ids) if len(draft_ids) < vocab_size else set()))
    if not 0 <= named < vocab_size:
        raise HeadError(f"mask_token_id is {named}, wanted 0 to {vocab_size - 1}; name a token of the target")
    if named in empty:
        raise HeadError(
            f"mask_token_id is {named}, whose embedding in {target_dir} is near zero, so that the rows of a block "
            "could not tell their places; name a token that never occurs and has a trained embedding"
        )
    return named


def _rows_near_zero(embedding: Tensor) -> set[int]:
    """The ids of the rows whose scale is far below that of the median row."""
    scale = torch.linalg.vector_norm(embedding, dim=-1, dtype=torch.float32)
    return set((scale < LEAST_SCALE * scale.median()).nonzero()[:, 0].tolist())


def _named_ids(folder: Path) -> set[int]:
    """bos_token_id, eos_token_id, ... of config.json and generation_config.json."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if not (folder / name).is_file():
            continue
        values = text_config(read_json(folder / name))
        for key, value in values.items():
            if key.endswith("_token_id") or key.endswith("_token_ids"):
                found |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
    return found


def _template(folder: Path) -> str:
    """The chat template, and the tokens for which tokenizer_config.json has a role."""
    own, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    text = own.read_text(encoding="utf-8") if own.is_file() else ""
    if settings.is_file():
        values = read_json(settings)
        roles = {k: v for k, v in values.items() if k == "chat_template" or (k.endswith("_token") and "mask" not in k)}
        text += json.dumps(roles, ensure_ascii=False)
    return text
