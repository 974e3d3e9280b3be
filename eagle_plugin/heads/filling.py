"""Tensors of a checkpoint or of the target put into a head."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.files import HeadError

Head = TypeVar("Head", bound=DraftHead)


def fill(
    head: Head,
    weights: dict[str, Tensor],
    shared: dict[str, Tensor],
    dtype: torch.dtype | None,
    folder: str | Path,
) -> Head:
    """Put the tensors of the checkpoint in `folder` into a head, in dtype or that of the checkpoint's fc.

    Tensors already in that dtype are not copied, and the embedding keeps its own. shared: the target's tensors
    (embedding, lm_head) by their names in the head's state dict; they replace those of the checkpoint. Tensors of the
    checkpoint that the module does not have are ignored, as the engine does.

    Raises:
        HeadError: a tensor is missing or has another shape (`check_head` says which and why).
    """
    weights = dict(weights)
    weights["embedding"] = weights.pop("embed_tokens.weight", torch.empty(0))
    weights |= shared
    state = head.state_dict()
    if "d2t" in state:
        weights.setdefault("d2t", state["d2t"])  # a head of the whole vocabulary stores none: offset 0
    try:
        dtype = dtype or weights["fc.weight"].dtype
        kept = {name: weights[name] for name in state}
        cast = {name: w.to(dtype) if w.is_floating_point() else w.long() for name, w in kept.items()}
        head.load_state_dict(cast | {"embedding": kept["embedding"]}, assign=True)
    except (KeyError, RuntimeError) as error:
        found = " ".join(str(error).split())  # torch's is of several lines
        raise HeadError(f"{folder} does not fit its config.json ({found}); run check_head for the details") from error
    return head


@torch.no_grad()
def copy_if_alike(parameter: Tensor, value: Tensor | None) -> None:
    """Copy a tensor of the target into a parameter, in place, where it exists and has the same shape."""
    if value is not None and value.shape == parameter.shape:
        parameter.copy_(value)
