"""Sequence partition of P-EAGLE (arXiv 2602.01469): memory that does not grow with the number of depths.

The chains of a batch are cut into segments of neighbouring anchors. One segment after the other is drafted, scored and
differentiated, and its activations are freed before the next one begins. The gradients of what the segments share
(keys, values and states of the verified rows, the weights of the layers) are summed and go into the one backward of the
verified rows. So nothing is computed twice, no attention is cut off, and the sum is that of the whole batch.

As in `learning.train.loss`, the gradients are computed in the forward, because the activations exist only there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.learning.train.batches import Batch
from eagle_plugin.learning.train.parallel import MaskedRows


class Segment(NamedTuple):
    """The chains of neighbouring rows of a batch."""

    context: int  # the first row of the document that row `start` is in
    start: int  # the rows start .. end - 1 are anchors of this segment
    end: int
    masked: slice  # which masked rows are theirs


def cut_segments(batch: Batch, rows: MaskedRows, limit: int) -> list[Segment]:
    """Segments of about equal size with at most `limit` masked rows, or one chain where that is longer."""
    n = len(batch)
    before = torch.zeros(n + 1, dtype=torch.int64, device=rows.anchor.device)
    before[1:] = torch.bincount(rows.anchor, minlength=n).cumsum(0)
    counts = before.tolist()
    share = -(-counts[-1] // max(1, -(-counts[-1] // limit)))
    segments, start = [], 0
    while start < n:
        wanted = counts[start] + share
        end = n if wanted >= counts[-1] else int(torch.searchsorted(before, wanted, right=True)) - 1
        end = max(end, start + 1)
        context = batch.bounds[int(batch.document[start])]
        segments.append(Segment(context, start, end, slice(counts[start], counts[end])))
        start = end
    return segments


Job = Callable[[Segment, list[Tensor]], tuple[Tensor, Tensor]]


def add_segments(job: Job, segments: list[Segment], rows: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The sums of what `job` returns for every segment: a loss (scalar), and measures without gradient.

    rows: tensors of all N rows of the batch. The job gets their rows context .. end - 1 and must use these in place of
    the whole. weights: all other tensors with a gradient that the job uses.
    """
    learn = torch.is_grad_enabled()
    return _Segments.apply(job, segments, len(rows), learn, *rows, *(w for w in weights if w.requires_grad))


class _Segments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, job: Job, segments: list[Segment], count: int, learn: bool, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, weights = tensors[:count], tensors[count:]
        # Sums of many parts: in float32 or wider.
        grads = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors if learn]
        losses, measures = [], []
        for segment in segments:
            span = slice(segment.context, segment.end)
            with torch.set_grad_enabled(learn):
                parts = [row[span].detach().requires_grad_(learn) for row in rows]
                loss, measured = job(segment, parts)
            losses.append(loss.detach())
            measures.append(measured)
            if learn:
                found = torch.autograd.grad(loss, [*parts, *weights], allow_unused=True)
                for i, grad in enumerate(found):
                    if grad is not None:
                        (grads[i][span] if i < count else grads[i]).add_(grad)
        ctx.save_for_backward(*(grad.to(x.dtype) for grad, x in zip(grads, tensors, strict=False)))
        sums = torch.stack(measures).sum(0)
        ctx.mark_non_differentiable(sums)
        return torch.stack(losses).sum(), sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *(x * grads[0].to(x.dtype) for x in ctx.saved_tensors)
