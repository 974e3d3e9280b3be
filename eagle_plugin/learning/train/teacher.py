"""The target's distribution over the draft vocabulary, which a head learns.

Letters in shapes: R target rows, H hidden size, D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.learning.data.store.features import Readout


class Distribution(NamedTuple):
    """The target's distribution for some rows."""

    p: Tensor  # [R, D] float32, not renormalised
    mass: Tensor  # [R] float32, the sum of p
    top: Tensor  # [R] int64, the draft id of the target's most probable token; -1 outside the draft vocabulary


class Teacher:
    """The target's distribution over the draft vocabulary, from its last hidden states."""

    def __init__(
        self,
        readout: Readout,
        draft_ids: Tensor | None,
        dtype: torch.dtype,
        *,
        mode: Literal["full", "draft"] = "full",
        oov: Literal["mass", "drop"] = "mass",
        top_k: int = 0,
    ) -> None:
        """draft_ids [D] int64, ascending target ids; None: the whole vocabulary.

        mode "full" normalises over V, "draft" over D only, which costs D / V of it. oov "drop" renormalises over D and
        leaves out rows whose most probable token is outside. top_k > 0 keeps that many of the draft tokens.
        """
        vocab = len(readout.weight)
        self.rest: Readout | None = None
        self.in_draft: Tensor | None = None
        self.readout, self.dtype = readout, dtype
        if draft_ids is None or len(draft_ids) == vocab:
            self.draft = _of_tokens(readout, None, dtype)
        else:
            self.draft = _of_tokens(readout, draft_ids, dtype)
            inside = torch.zeros(vocab, dtype=torch.bool, device=draft_ids.device)
            inside[draft_ids] = True
            if mode == "full":
                self.rest = _of_tokens(readout, (~inside).nonzero()[:, 0], dtype)
            else:
                self.in_draft = inside
        self.drop, self.top_k = oov == "drop", top_k

    def read(self, last: Tensor, tokens: Tensor, tile: int, whole: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits over D [R, D], what they are normalised by [R], and the most probable draft token [R] or -1.

        last [R, H], tokens [R] int64: what came next in the data. Without the rest of the vocabulary (mode "draft"),
        `tokens` decide which rows the head cannot predict. tile: rows at once in float32. whole: normalise over V in
        mode "draft" too, which reads the rest of the readout in parts as large as that of D.
        """
        logits = self.draft(last)
        parts = [_highest(widen(part)) for part in logits.split(tile)]
        norm, best, top = (torch.cat(column) for column in zip(*parts, strict=True))
        for others in self._others(whole):
            for i, part in enumerate(others(last).split(tile)):
                rows, wide = slice(i * tile, (i + 1) * tile), widen(part)
                top[rows].masked_fill_(wide.amax(-1) > best[rows], -1)
                norm[rows] = torch.logaddexp(norm[rows], wide.logsumexp(-1))
        if self.in_draft is not None and not whole:
            top = top.masked_fill(~self.in_draft[tokens], -1)
        return logits, norm, top

    def _others(self, whole: bool) -> Iterator[Readout]:
        """The readout of the tokens outside the draft vocabulary, in parts of at most D of them."""
        width = len(self.draft.weight)
        if self.rest is not None:
            for start in range(0, len(self.rest.weight), width):
                columns = slice(start, start + width)
                bias = None if self.rest.bias is None else self.rest.bias[columns]
                yield replace(self.rest, weight=self.rest.weight[columns], bias=bias)
        elif self.in_draft is not None and whole:
            for ids in (~self.in_draft).nonzero()[:, 0].split(width):
                yield _of_tokens(self.readout, ids, self.dtype)

    def spread(self, logits: Tensor, norm: Tensor, top: Tensor) -> Distribution:
        """The distribution of some rows of what `read` returned."""
        p = widen(logits).sub(norm[:, None]).exp_()
        if self.drop:
            p.mul_(((top >= 0) / p.sum(-1))[:, None])
        if self.top_k:
            kept = p.topk(self.top_k)
            p = torch.zeros_like(p).scatter_(-1, kept.indices, kept.values)
        return Distribution(p, p.sum(-1), top)


def _of_tokens(readout: Readout, ids: Tensor | None, dtype: torch.dtype) -> Readout:
    """The readout in another dtype, of the tokens `ids` alone."""
    weight, bias = readout.weight.detach(), None if readout.bias is None else readout.bias.detach()
    if ids is not None:
        weight, bias = weight[ids.to(weight.device)], None if bias is None else bias[ids.to(weight.device)]
    return replace(readout, weight=weight.to(dtype), bias=None if bias is None else bias.to(dtype))


def widen(x: Tensor) -> Tensor:
    """In float32, or in float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


def _highest(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logsumexp [R], the highest logit [R] and where it is [R]."""
    best, top = logits.max(-1)
    return logits.logsumexp(-1), best, top
