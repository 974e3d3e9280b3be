"""What masked rows of a P-EAGLE head read in vLLM, whose own class for such heads keeps it under one flag only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from eagle_plugin.engines.parallel_levels import MaskRow
from eagle_plugin.heads.files import MASK_KEYS, HeadError, check_mask_token, read_mask_token


def mask_token(speculative_config: Any) -> int | None:
    """The id that masked rows read if the head of a vLLM ``SpeculativeConfig`` is a P-EAGLE head, else None.

    Raises:
        HeadError: it is not an id of the target; or the flag parallel_drafting is given for a head of another kind.
    """
    draft, head = speculative_config.draft_model_config, speculative_config.model
    keys = {key: getattr(draft.hf_config, key, None) for key in MASK_KEYS}
    token = read_mask_token(keys, head) if speculative_config.method == "eagle3" else None
    if token is None:
        if speculative_config.parallel_drafting:
            raise HeadError(
                f"--speculative-config has parallel_drafting true and the draft head {head}, wanted a P-EAGLE head: "
                f"method eagle3, and {', '.join(MASK_KEYS[:-1])} or {MASK_KEYS[-1]} in its config.json; remove "
                "parallel_drafting for an EAGLE head"
            )
        return None
    return check_mask_token(token, draft.get_vocab_size(), f"{head} has mask_token_id")


@contextmanager
def keeping_the_mask(speculative_config: Any) -> Iterator[None]:
    """Let vLLM's class for EAGLE-3 heads have the tensor mask_hidden of the head that is loaded inside.

    The flag is off before and after: with it vLLM plans a chain's masked rows into every step, which takes room of the
    step's tokens, and its proposer drafts such chains.
    """
    speculative_config.parallel_drafting = True
    try:
        yield
    finally:
        speculative_config.parallel_drafting = False


@torch.no_grad()
def mask_row(model: Any, token: int) -> MaskRow:
    """What masked rows read, of a head that was loaded inside `keeping_the_mask`."""
    return MaskRow(token, model.combine_hidden_states(model.mask_hidden))
