"""What config.json of a block drafter (DFlash, DSpark) says: which kind it is, its block, its mask token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from eagle_plugin.core.shape import MAX_WIDTH

T = TypeVar("T")

# The kinds, by vLLM's names in --speculative-config.
METHOD = "dflash"
MARKOV = "dspark"  # with a Markov head: a node's children depend on its own token
METHODS = (METHOD, MARKOV)
# SGLang's names of them, in --speculative-algorithm.
ALGORITHM: Final = "DFLASH"
MARKOV_ALGORITHM: Final = "DSPARK"
ARCHITECTURE = "DFlashDraftModel"
MARKOV_ARCHITECTURE = "Qwen3DSparkModel"
ARCHITECTURES = {METHOD: ARCHITECTURE, MARKOV: MARKOV_ARCHITECTURE}  # that the plugin writes and serves


NOT_CAUSAL = "sliding_window_non_causal"  # of speculators


def is_block_drafter(config: dict[str, Any]) -> bool:
    """Whether this config.json is of a block drafter, of whatever engine and kind."""
    names = config.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    return (
        "dflash_config" in config
        or config.get("speculators_model_type") in ("dflash", "dflash2", "dspark")
        or any("DFlash" in name or "DSpark" in name for name in names)
    )


def kind_of(config: dict[str, Any]) -> str | None:
    """The kind of a block drafter, one of METHODS; None: another one."""
    named, names = config.get("speculators_model_type"), config.get("architectures")
    if named is not None:
        return named if named in METHODS else None
    if names == ["DSparkDraftModel"] and config.get("model_type") == "qwen3":  # other types are of other layers
        return MARKOV
    return next((kind for kind, name in ARCHITECTURES.items() if names == [name]), None)


def options_of(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of ``dflash_config``, and what DSpark and speculators write at the top in their place."""
    found = dict(config.get("dflash_config") or {})
    if config.get("speculators_model_type") in METHODS:
        found.setdefault("mask_token_id", config.get("mask_token_id"))
        if isinstance(layers := config.get("aux_hidden_state_layer_ids"), list):
            found.setdefault("target_layer_ids", [i - 1 if type(i) is int else i for i in layers])
        found.setdefault("sample_from_anchor", config.get("sample_from_anchor", False))
        if config["speculators_model_type"] == METHOD:
            found["causal"] = not config.get(NOT_CAUSAL, True)  # of all layers, as vLLM reads it
    elif kind_of(config) == MARKOV:
        at_top: dict[str, Any] = {key: config[key] for key in ("mask_token_id", "target_layer_ids") if key in config}
        found = at_top | found
        found["sample_from_anchor"] = config.get("sample_from_anchor", True)
    return found


def mask_token_of(config: dict[str, Any]) -> int:
    """The id of the masks, as vLLM looks it up; 0 where there is none."""
    token = options_of(config).get("mask_token_id", config.get("mask_token_id"))
    return int(token or 0)


def block_rows(config: dict[str, Any]) -> int | None:
    """The rows of the block that a drafter was trained with; None where config.json does not say."""
    found = config.get("block_size", options_of(config).get("block_size"))
    return found if type(found) is int else None


def first_row(config: dict[str, Any]) -> int:
    """The row of the block that lists the first level: 0, the root's own, where a drafter samples from its anchor."""
    return 0 if kind_of(config) == MARKOV and options_of(config)["sample_from_anchor"] else 1


def levels_of_block(config: dict[str, Any], draft_tokens: int) -> int:
    """The levels that a drafter lists at once where a round drafts so many tokens."""
    return min((block_rows(config) or MAX_WIDTH) - first_row(config), draft_tokens)


def without_confidence(tensors: Mapping[str, T]) -> dict[str, T]:
    """The tensors of a checkpoint without those of a confidence head, which no drafting here reads."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("confidence_head.")}


def is_causal(config: dict[str, Any]) -> bool:
    """Whether a row of the block sees only the rows up to its own, as vLLM reads it where no layer has a window.

    SGLang reads `is_causal` alone, and that only beside `layer_types`. In a config.json of speculators vLLM reads it
    among the keys of the layers alone.
    """
    inner = config.get("transformer_layer_config")
    found = (inner if isinstance(inner, dict) else config).get("is_causal")
    return bool(options_of(config).get("causal") if found is None else found)
