"""The loss over the draft vocabulary, in chunks: tensors of size [rows, vocabulary] exist for one chunk only.

With p the target's distribution restricted to the draft vocabulary D (not renormalised: its sum `mass` is below 1) and
q the head's softmax over D:

    CE = - sum_{v in D} p(v) log q(v),    dCE/dz = mass q - p

This is the whole cross-entropy for a head that cannot emit the rest of the vocabulary, so a row has little weight if
the target's probable tokens are outside D. The objective "lk" (LK losses, arXiv 2602.23881) mixes in the acceptance
alpha = sum_v min(p(v), q(v)): lambda CE + (1 - lambda) (1 - alpha) with lambda = exp(-3 alpha), a constant.

Gradients are computed in the forward, because the chunk exists only there. The target's distribution is computed once
per chunk for all draft steps.

On a CPU the products run over `CHUNK` elements, because matrix products are efficient with many rows, and everything
else over `TILE` elements, which stay in the cache; float32 values exist for one tile only.

Letters in shapes: R target rows, S head rows of one step, H hidden size, D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.learning.train.columns import Columns
from eagle_plugin.learning.train.teacher import Distribution, Teacher, widen

Loss = Literal["ce", "lk"]
LK_RATE = 3.0
# Elements of logits at once. On a GPU one large tile per chunk is the fastest.
CHUNK = {"cpu": 1 << 21, "cuda": 1 << 27}
TILE = {"cpu": 1 << 19, "cuda": 1 << 27}


class StepRows(NamedTuple):
    """The rows of one draft step that are learnt from."""

    inputs: Tensor  # [S, H], what lm_head reads
    teacher: Tensor  # [S] int64 ascending: which of the R target rows
    factor: Tensor  # [S] float32, the weight of the row in the sum


class RowScores(NamedTuple):
    """The results of the rows of one step, all [S] float32 except `choice`; without gradient."""

    loss: Tensor  # before its factor
    hit: Tensor  # 1 where the head's most probable token is the target's
    mass: Tensor
    alpha: Tensor  # nan unless `detail` is set
    choice: Tensor  # int64, the head's most probable draft id


def vocabulary_loss(
    teacher: Teacher,
    last: Tensor,
    tokens: Tensor,
    steps: list[StepRows],
    weight: Tensor,
    *,
    loss: Loss = "ce",
    detail: bool = False,
    tile: int | None = None,
    columns: int = 0,
    seed: int = 0,
    whole: bool = False,
) -> tuple[Tensor, list[RowScores]]:
    """Return sum over all rows of factor * loss, float32, and the scores of every step's rows.

    last [R, H] and tokens [R] int64 (what came next): the target rows; weight [D, H]: lm_head, trained if it requires
    a gradient. detail: measure alpha. tile: target rows at once; None: a number for the device. columns: how many of
    lm_head learn from a chunk of rows (`columns.py`; the loss and the scores are then estimates); 0: all, as always
    without gradient. seed: of the choice. whole: normalise over V, whatever the mode of the teacher.
    """
    device = "cuda" if last.is_cuda else "cpu"
    tile = tile or max(8, TILE[device] // len(weight))
    chunk = tile * max(1, CHUNK[device] // TILE[device])
    marks = torch.arange(0, len(last) + tile, tile, device=last.device).clamp(max=len(last))
    job = _Job(
        teacher,
        last,
        tokens,
        [step.teacher for step in steps],
        [step.factor for step in steps],
        [torch.searchsorted(step.teacher, marks).tolist() for step in steps],
        tile,
        chunk,
        loss,
        detail,
        columns if 0 < columns < len(weight) else 0,
        torch.Generator().manual_seed(seed),
        whole,
    )
    value, *flat = _VocabularyLoss.apply(job, torch.is_grad_enabled(), weight, *[step.inputs for step in steps])
    return value, [RowScores(*flat[i : i + 5]) for i in range(0, len(flat), 5)]


class _Job(NamedTuple):
    teacher: Teacher
    last: Tensor
    tokens: Tensor
    rows: list[Tensor]
    factors: list[Tensor]
    edges: list[list[int]]  # of every step: its first row in every tile of target rows
    tile: int
    chunk: int  # a multiple of tile
    loss: Loss
    detail: bool
    columns: int  # 0: all
    generator: torch.Generator
    whole: bool


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, learn: bool, weight: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        learn_weight = learn and ctx.needs_input_grad[2]
        dtype = inputs[0].dtype
        matrix = weight.to(dtype)
        statistic = torch.float64 if dtype == torch.float64 else torch.float32
        input_grads = [torch.empty_like(x) for x in inputs] if learn else []
        weight_grad = torch.zeros_like(weight) if learn_weight else None
        scores = [_empty_scores(len(x), x.device, statistic) for x in inputs]

        for start in range(0, len(job.last), job.chunk):
            rows = slice(start, start + job.chunk)
            first, tiles = start // job.tile, -(-len(job.last[rows]) // job.tile)
            spans = [slice(edge[first], edge[first + tiles]) for edge in job.edges]
            target = job.teacher.read(job.last[rows].to(dtype), job.tokens[rows], job.tile, job.whole)
            columns, learnt = None, matrix
            spread: Callable[..., Distribution] = job.teacher.spread
            if learn and job.columns:
                whole = spread(*target)
                columns = Columns(whole.p.sum(0), job.columns, job.generator)
                p, learnt = columns.take(whole.p), matrix.index_select(0, columns.ids)
                target, spread = (p, p.sum(-1), whole.top), Distribution
            # The logits of all steps; the tiles turn them into gradients in place.
            slopes = torch.cat([x[span] for x, span in zip(inputs, spans, strict=True)]) @ learnt.T
            offsets = [0]
            for span in spans:
                offsets.append(offsets[-1] + span.stop - span.start)
            for i in range(tiles):
                here = spread(*(part[i * job.tile : (i + 1) * job.tile] for part in target))
                for k, edge in enumerate(job.edges):
                    span = slice(edge[first + i], edge[first + i + 1])
                    if span.start == span.stop:
                        continue
                    local = job.rows[k][span] - (first + i) * job.tile
                    seen = here if len(local) == len(here.top) else Distribution(*(part[local] for part in here))
                    at = offsets[k] + span.start - spans[k].start
                    _score(slopes[at : at + len(local)], seen, scores[k], span, job, learn, columns)
            if not learn:
                continue
            factor = torch.cat([f[span] for f, span in zip(job.factors, spans, strict=True)])[:, None].to(dtype)
            for grad, span, at in zip(input_grads, spans, offsets, strict=False):
                torch.mm(slopes[at : at + span.stop - span.start], learnt, out=grad[span])
                grad[span] *= factor[at : at + span.stop - span.start]
            if weight_grad is not None:
                part = slopes.T @ (torch.cat([x[s] for x, s in zip(inputs, spans, strict=True)]) * factor)
                if columns is None:
                    weight_grad += part
                else:
                    weight_grad.index_add_(0, columns.ids, part.to(weight_grad.dtype))
        ctx.save_for_backward(*input_grads, *([] if weight_grad is None else [weight_grad]))
        ctx.steps = len(inputs)
        flat = [tensor for score in scores for tensor in score]
        ctx.mark_non_differentiable(*flat)
        parts = [(factor * score.loss).sum() for factor, score in zip(job.factors, scores, strict=True)]
        return torch.stack(parts).sum(), *flat

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs, weight = saved[: ctx.steps], saved[ctx.steps :]
        weight_grad = weight[0] * grads[0] if weight else None
        return None, None, weight_grad, *(x * grads[0].to(x.dtype) for x in inputs)


def _empty_scores(rows: int, device: torch.device, dtype: torch.dtype) -> RowScores:
    loss, hit, mass = torch.zeros(3, rows, dtype=dtype, device=device)
    alpha = torch.full((rows,), float("nan"), dtype=dtype, device=device)
    return RowScores(loss, hit, mass, alpha, torch.zeros(rows, dtype=torch.int64, device=device))


def _score(
    logits: Tensor,
    target: Distribution,
    score: RowScores,
    span: slice,
    job: _Job,
    learn: bool,
    columns: Columns | None,
) -> None:
    """Score the rows `span` of a step, and overwrite their logits [s, D], or of the columns, by the loss's gradient."""
    p, mass, top = target
    wide = widen(logits)
    if columns is None:
        highest, choice = wide.max(-1, keepdim=True)
        choice = choice[:, 0]
    else:
        choice = columns.ids[wide[:, : columns.certain].argmax(-1)]
        wide = wide + columns.log_weight
        highest = wide.amax(-1, keepdim=True)
    shifted = wide.sub_(highest) if wide is not logits else wide - highest
    product = torch.linalg.vecdot(p, shifted)
    if columns is not None:
        product -= p @ columns.log_weight  # the weights are of the sums, not of the logits
    powers = shifted.exp_()
    total = powers.sum(-1)
    losses = mass * total.log() - product
    score.hit[span], score.choice[span], score.mass[span] = (choice == top).to(p.dtype), choice, mass
    share = None
    if job.detail or job.loss == "lk":
        q = powers.div_(total[:, None])
        total = torch.ones_like(total)
        score.alpha[span] = alpha = torch.minimum(p, q).sum(-1)
        if job.loss == "lk":
            share = (-LK_RATE * alpha).exp()
            losses = share * losses + (1 - share) * (1 - alpha)
    score.loss[span] = losses
    if not learn:
        return
    if share is None:
        logits.copy_(powers.mul_((mass / total)[:, None]).sub_(p))
        return
    # d alpha / d z_j = q_j (below_j - sum_v below_v q_v), with below = 1 where q < p
    below = powers * (powers < p)
    scale = mass * share + (1 - share) * below.sum(-1)
    logits.copy_(scale[:, None] * powers - (1 - share)[:, None] * below - share[:, None] * p)
