"""Draft vocabularies of heads with an lm_head of their own: the check of the ids, and the change to others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
def with_vocabulary(
    lm_head: Tensor, d2t: Tensor, draft_ids: Tensor, target_lm_head: Tensor
) -> tuple[nn.Linear, nn.Buffer, int]:
    """The lm_head, the table d2t and the number of known tokens of a head that shall draft from other tokens.

    lm_head [D, H] and d2t [D] are those that it has. draft_ids, target_lm_head and the errors as in
    `DraftHead.change_vocabulary`.
    """
    vocabulary, hidden = target_lm_head.shape
    check_draft_ids(draft_ids, vocabulary)
    if lm_head.shape[1] != hidden:
        raise HeadError(
            f"the head's hidden size is {lm_head.shape[1]} and the target's {hidden}, so new tokens cannot start from "
            "the target's lm_head; keep the head's draft vocabulary"
        )
    place = torch.full((vocabulary,), -1, dtype=torch.int64)
    own = torch.arange(len(lm_head))
    place[own + d2t] = own
    before = place[draft_ids]
    rows = target_lm_head[draft_ids].to(lm_head.dtype)
    known = before >= 0
    rows[known] = lm_head[before[known]]
    made = nn.Linear(hidden, len(draft_ids), bias=False, dtype=lm_head.dtype)
    made.weight.copy_(rows)
    return made, nn.Buffer(draft_ids - torch.arange(len(draft_ids))), int(known.sum())
