"""What config.json of a block drafter (DFlash) says: whether it is one, its block, its mask token."""

from __future__ import annotations

from typing import Any, Final

from eagle_plugin.core.shape import MAX_WIDTH

METHOD = "dflash"  # vLLM's name in --speculative-config
ALGORITHM: Final = "DFLASH"  # SGLang's, in --speculative-algorithm
ARCHITECTURE = "DFlashDraftModel"


def is_block_drafter(config: dict[str, Any]) -> bool:
    """Whether this config.json is of a block drafter, of whatever engine and kind."""
    names = config.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    return (
        "dflash_config" in config
        or config.get("speculators_model_type") in ("dflash", "dflash2", "dspark")
        or any("DFlash" in name or "DSpark" in name for name in names)
    )


def options_of(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of ``dflash_config``, and what speculators write at the top in their place."""
    found = dict(config.get("dflash_config") or {})
    if config.get("speculators_model_type") == "dflash":
        found.setdefault("mask_token_id", config.get("mask_token_id"))
        if isinstance(layers := config.get("aux_hidden_state_layer_ids"), list):
            found.setdefault("target_layer_ids", [i - 1 if type(i) is int else i for i in layers])
        found.setdefault("sample_from_anchor", config.get("sample_from_anchor", False))
    return found


def mask_token_of(config: dict[str, Any]) -> int:
    """The id of the masks, as vLLM looks it up; 0 where there is none."""
    token = options_of(config).get("mask_token_id", config.get("mask_token_id"))
    return int(token or 0)


def block_rows(config: dict[str, Any]) -> int | None:
    """The rows of the block that a drafter was trained with; None where config.json does not say."""
    found = config.get("block_size", options_of(config).get("block_size"))
    return found if type(found) is int else None


def levels_of_block(config: dict[str, Any], draft_tokens: int) -> int:
    """The levels that a drafter lists at once where a round drafts so many tokens."""
    return min(block_rows(config) or MAX_WIDTH, draft_tokens + 1) - 1


def is_causal(config: dict[str, Any]) -> bool:
    """Whether a row of the block sees only the rows up to its own, as vLLM reads it where no layer has a window.

    SGLang reads `is_causal` alone, and that only beside `layer_types`.
    """
    found = config.get("is_causal")
    return bool(options_of(config).get("causal") if found is None else found)
