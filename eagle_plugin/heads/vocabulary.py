"""The check of the ids of a draft vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

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
