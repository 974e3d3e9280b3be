"""Attention of training-time test: causal over the verified tokens, and to each row's own drafted ones.

At step k, row t attends to the keys of step 0 up to t, and of the steps 1..k only to its own (EAGLE-3, arXiv
2503.01840, section 3.2). With o_0 and l_0 the output and log-sum-exp of causal attention, and s_i = scale <q, k_i>:

    l = logsumexp(l_0, s_1..s_k),    o = e^(l_0 - l) o_0 + sum_i e^(s_i - l) v_i

The flash backward, given (o, l) in place of (o_0, l_0), computes e^(s_ij - l) and e^(s_ij - l) (do . v_j - do . o):
the terms of the joint softmax. So the gradients are exact and nothing of size [rows, rows] is kept.

A head with a window of W keys sees of the keys of step 0 those from t + k - W + 1 on: its own of steps 1..k are in it.

Letters in shapes: N rows, h query heads, g key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
PART = 256  # rows that read the keys of a window together, on a CPU


class Packing:
    """Where the documents are on a flat axis, for block-diagonal causal attention."""

    def __init__(self, starts: Tensor, window: int | None = None) -> None:
        """starts [documents + 1] int64: the first row of every document, and N; window: `DraftHead.window`."""
        self.window = window
        bounds = starts.tolist()
        self.spans = [(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]
        self.longest = max((b - a for a, b in self.spans), default=0)
        self.starts = starts.to(torch.int32)

    def before(self, step: int) -> int:
        """How many keys of step 0 before its own a row of this step sees; -1: all."""
        return -1 if self.window is None else self.window - 1 - step

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, before: int = -1
    ) -> tuple[Tensor, Tensor, list[Any]]:
        """q [N, h, D], k and v [N, g, D] -> output [N, h, D], log-sum-exp [N, h] and what `backward` needs."""
        if q.is_cuda:
            s, n = self.starts, self.longest
            out, lse, *rng, _ = _aten._flash_attention_forward(
                q, k, v, s, s, n, n, 0.0, True, False, scale=scale, **_window(before)
            )
            return out, lse.mT, rng  # the kernel packs log-sum-exp as [h, N]
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=_statistic(q.dtype))
        for rows, keys, mask in self._parts(before, q):
            part = _aten._scaled_dot_product_flash_attention_for_cpu(
                _heads_first(q[rows]), _heads_first(k[keys]), _heads_first(v[keys]), 0.0, mask is None,
                attn_mask=mask, scale=scale,
            )  # fmt: skip
            out[rows], lse[rows] = part[0][0].transpose(0, 1), part[1][0].mT
        return out, lse, []

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        rng: list[Any],
        scale: float,
        before: int = -1,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, for the out [N, h, D] and lse [N, h] of the whole softmax."""
        if q.is_cuda:
            s, n = self.starts, self.longest
            return _aten._flash_attention_backward(
                grad, q, k, v, out, lse.mT.contiguous(), s, s, n, n, 0.0, True, *rng, scale=scale, **_window(before)
            )
        new = torch.empty_like if before < 0 else torch.zeros_like  # windows share keys
        grads = new(q), new(k), new(v)
        for rows, keys, mask in self._parts(before, q):
            parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(_heads_first(x) for x in (grad[rows], q[rows], k[keys], v[keys], out[rows])),
                lse[rows].mT[None], 0.0, mask is None, attn_mask=mask, scale=scale,
            )  # fmt: skip
            for whole, of, part in zip(grads, (rows, keys, keys), parts, strict=True):
                found = part[0].transpose(0, 1)
                whole[of] = found if before < 0 else whole[of] + found
        return grads

    def _parts(self, before: int, like: Tensor) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Rows that are read together, the keys that they see, and a mask where these are not all keys before a row."""
        for a, b in self.spans:
            if before < 0 or b - a <= before + 1:
                yield slice(a, b), slice(a, b), None
                continue
            for start in range(a, b, PART):
                end, first = min(start + PART, b), max(start - before, a)
                back = torch.arange(start, end)[:, None] - torch.arange(first, end)
                mask = torch.zeros(back.shape, dtype=like.dtype)
                yield slice(start, end), slice(first, end), mask.masked_fill_((back < 0) | (back > before), -torch.inf)


def _window(before: int) -> dict[str, int]:
    """As the kernels for CUDA take it."""
    return {} if before < 0 else {"window_size_left": before, "window_size_right": 0}


def _heads_first(x: Tensor) -> Tensor:
    """[n, heads, D] -> [1, heads, n, D], a view."""
    return x.transpose(0, 1)[None]


def _statistic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packing: Packing, scale: float, q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Tensor:
        before = packing.before(len(own) // 2)
        out, lse, rng = packing.forward(q, k, v, scale, before)
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        if own:
            scores = torch.stack([_dot(q, key) for key in keys]) * scale  # [steps, N, h]
            joint = torch.logaddexp(lse, scores.logsumexp(0))
            out = out * (lse - joint).exp().to(q.dtype)[..., None]
            for share, value in zip((scores - joint).exp().to(q.dtype), values, strict=True):
                _grouped(out, value).addcmul_(_grouped(share[..., None], value), value[:, :, None])
            lse = joint
        ctx.packing, ctx.scale, ctx.rng, ctx.before = packing, scale, rng, before
        ctx.save_for_backward(q, k, v, out, lse, *own)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *own = ctx.saved_tensors
        grad, scale = grads[0].contiguous(), ctx.scale
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        dq, dk, dv = ctx.packing.backward(grad, q, k, v, out, lse, ctx.rng, scale, ctx.before)
        delta = (grad * out).sum(-1, dtype=lse.dtype)  # [N, h]
        key_grads, value_grads = [], []
        for key, value in zip(keys, values, strict=True):
            share = (_dot(q, key) * scale - lse).exp()
            slope = (share * (_dot(grad, value) - delta) * scale).to(q.dtype)[..., None]  # d loss / d <q, k>
            _grouped(dq, key).addcmul_(_grouped(slope, key), key[:, :, None])
            key_grads.append(_grouped(slope * q, key).sum(2))
            value_grads.append(_grouped(share.to(q.dtype)[..., None] * grad, value).sum(2))
        return None, None, dq, dk, dv, *key_grads, *value_grads


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """[N, h, ...] -> [N, g, h / g, ...]: the query heads that share a key-value head of `like` side by side."""
    return x.unflatten(1, (like.shape[1], -1))


def _dot(x: Tensor, own: Tensor) -> Tensor:
    """x [N, h, D], own [N, g, D] -> their products [N, h], summed in float32 or better."""
    return (_grouped(x, own) * own[:, :, None]).sum(-1, dtype=_statistic(x.dtype)).flatten(1)


def attend(
    packing: Packing, q: Tensor, k: Tensor, v: Tensor, own_keys: list[Tensor], own_values: list[Tensor], scale: float
) -> Tensor:
    """Causal attention within each document and the head's window, plus to the row's own keys of later steps.

    q [N, h, D]; k, v [N, g, D] of step 0; own_keys, own_values: one [N, g, D] per step -> [N, h, D].
    """
    return _Attend.apply(packing, scale, q, k, v, *own_keys, *own_values)
