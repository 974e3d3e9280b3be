"""Draft vocabularies: what is one, and giving an existing head another one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eagle_plugin.heads.eagle3 import Eagle3Head
from eagle_plugin.heads.files import HeadError


def check_draft_ids(ids: Tensor, vocabulary: int) -> None:
    """Raise HeadError unless ids are target ids in ascending order, int64 [D] with D > 0."""
    if ids.dtype != torch.int64 or ids.dim() != 1 or not len(ids):
        raise HeadError(
            f"the draft vocabulary is {ids.dtype} of shape {list(ids.shape)}, wanted int64 [D] with D > 0; "
            "choose it again"
        )
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocabulary:
        raise HeadError(f"the draft vocabulary is not ascending ids from 0 to {vocabulary - 1}; choose it again")


@torch.no_grad()
def change_vocabulary(head: Eagle3Head, draft_ids: Tensor, target_lm_head: Tensor) -> int:
    """Let an EAGLE-3 or P-EAGLE head draft from other tokens, in place; returns how many of them it knew before.

    draft_ids [D] int64 are ascending target ids, target_lm_head [V, H] the target's. A token that the head knew keeps
    its row of lm_head, a new one starts with the target's row, which is what the whole lm_head of a new head starts
    with.

    Raises:
        HeadError: the ids are not ascending ids of the target, or the head's hidden size is not the target's.
    """
    vocabulary, hidden = target_lm_head.shape
    check_draft_ids(draft_ids, vocabulary)
    old = head.lm_head.weight
    if old.shape[1] != hidden:
        raise HeadError(
            f"the head's hidden size is {old.shape[1]} and the target's {hidden}, so new tokens cannot start from the "
            "target's lm_head; keep the head's draft vocabulary"
        )
    place = torch.full((vocabulary,), -1, dtype=torch.int64)
    place[head.to_target(torch.arange(len(old)))] = torch.arange(len(old))
    before = place[draft_ids]
    rows = target_lm_head[draft_ids].to(old.dtype)
    known = before >= 0
    rows[known] = old[before[known]]
    head.lm_head = nn.Linear(hidden, len(draft_ids), bias=False, dtype=old.dtype)
    head.lm_head.weight.copy_(rows)
    head.d2t = nn.Buffer(draft_ids - torch.arange(len(draft_ids)))
    head.config.draft_vocab_size = len(draft_ids)
    return int(known.sum())
