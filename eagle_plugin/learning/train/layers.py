"""A head's decoder layer for training: the same results as in `heads`, with fewer passes over memory.

On a CPU a third of a step would otherwise be element-wise passes and new memory pages. So activations are bfloat16 with
float32 parameters, norm weights are multiplied into the matrix that reads them, q, k, v and gate, up are one product
each, and norm, rotation and SwiGLU each keep one tensor for the backward.

Letters in shapes: N rows, H hidden size, h query heads, g key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        y = x * inverse.to(x.dtype)
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, inverse = ctx.saved_tensors
        along = (grads[0] * y).sum(-1, keepdim=True, dtype=inverse.dtype).div_(y.shape[-1])
        return torch.addcmul(grads[0], y, along.to(y.dtype), value=-1).mul_(inverse.to(y.dtype)), None


def normalise(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, in x's dtype."""
    return _Normalise.apply(x, eps)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        (grad,) = grads
        return torch.addcmul(grad * cos, grad.roll(grad.shape[-1] // 2, -1), sin, value=-1), None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        gate_grad, up_grad = out.chunk(2, -1)
        sigmoid = gate.sigmoid()
        torch.mul(sigmoid, gate, out=up_grad)  # silu
        slope = torch.addcmul(sigmoid, up_grad, 1 - sigmoid)
        torch.mul(grads[0], up, out=gate_grad)
        gate_grad.mul_(slope)
        up_grad.mul_(grads[0])
        return out


class Rotation(NamedTuple):
    """RoPE of one set of rows."""

    cos: Tensor  # [N, 1, D]
    sin: Tensor  # [N, 1, D], the first half negated

    def __call__(self, x: Tensor) -> Tensor:
        return _Rotate.apply(x, self.cos, self.sin)


class RotaryTable:
    """cos and sin of every position that a batch uses, from the head's own RoPE."""

    def __init__(self, head: Any, length: int, like: Tensor) -> None:
        positions = torch.arange(length, device=like.device)
        cos, sin = head.layers[0].self_attn.rotary(like, positions[None])
        half = sin.shape[-1] // 2
        self.cos = cos[0, :, None].to(like.dtype)
        self.sin = torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], -1).to(like.dtype)

    def at(self, positions: Tensor) -> Rotation:
        return Rotation(self.cos[positions], self.sin[positions])


def cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A parameter in the compute dtype; None stays None."""
    return None if parameter is None else parameter.to(dtype)


class Layer:
    """The weights of one decoder layer in the compute dtype, and the layer over them.

    Works for the layers of every kind; the first layer of an EAGLE-3 head has `embed`, the half of q, k, v that reads
    the embedding, whose result does not depend on the draft step, and those of block drafters norm queries and keys.
    """

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        projections: list[nn.Linear] = [attention.q_proj, attention.k_proj, attention.v_proj]
        weight = torch.cat([projection.weight for projection in projections])
        self.head_dim: int = attention.head_dim
        self.sizes = [projection.out_features // self.head_dim for projection in projections]
        self.scale = self.head_dim**-0.5
        norm = getattr(layer, "hidden_norm", layer.input_layernorm)
        self.eps: float = layer.post_attention_layernorm.eps
        self.normed = norm is not None
        hidden = attention.o_proj.out_features
        self.embed: Tensor | None = None
        if weight.shape[1] == 2 * hidden:
            self.embed = (weight[:, :hidden] * layer.input_layernorm.weight).to(dtype)
            weight = weight[:, hidden:]
        self.qkv = (weight if norm is None else weight * norm.weight).to(dtype)
        biases: list[Tensor] = [p.bias for p in projections if p.bias is not None]
        self.qkv_bias = cast(torch.cat(biases) if biases else None, dtype)
        self.norms: Tensor | None = None  # of each head's queries and keys [h + g, D]
        if attention.q_norm is not None:
            heads, groups, _ = self.sizes
            weights = [attention.q_norm.weight.expand(heads, -1), attention.k_norm.weight.expand(groups, -1)]
            self.norms = torch.cat(weights).to(dtype)
        self.output, self.output_bias = attention.o_proj.weight.to(dtype), cast(attention.o_proj.bias, dtype)
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        self.gate_up = (gate_up * layer.post_attention_layernorm.weight).to(dtype)
        self.down = mlp.down_proj.weight.to(dtype)

    def weights(self) -> list[Tensor]:
        """The tensors that a call multiplies with."""
        found = (self.qkv, self.qkv_bias, self.norms, self.output, self.output_bias, self.gate_up, self.down)
        return [tensor for tensor in found if tensor is not None]

    def read_embeddings(self, embeds: Tensor) -> Tensor | None:
        """embeds [N, H] -> their part of q, k, v [N, (h + 2 g) D], or None where the layer does not read them."""
        if self.embed is None:
            return None
        return F.linear(normalise(embeds, self.eps), self.embed)

    def __call__(
        self,
        x: Tensor,
        embedded: Tensor | None,
        rotation: Rotation,
        attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """x [N, H] and the embeddings' part of q, k, v -> [N, H].

        attention: q [N, h, D], k and v [N, g, D] -> [N, h, D]. x and embedded may have one row that stands for all rows
        of the rotation.
        """
        mixed = F.linear(normalise(x, self.eps) if self.normed else x, self.qkv, self.qkv_bias)
        if embedded is not None:
            mixed = mixed + embedded
        heads, groups, _ = self.sizes
        mixed = mixed.expand(len(rotation.cos), -1)
        qk, v = mixed.unflatten(-1, (-1, self.head_dim)).split([heads + groups, groups], 1)
        if self.norms is not None:
            qk = normalise(qk, self.eps) * self.norms
        qk = rotation(qk)
        attended = attention(qk[:, :heads], qk[:, heads:], v)
        x = x + F.linear(attended.flatten(1), self.output, self.output_bias)
        return x + F.linear(_SwiGLU.apply(F.linear(normalise(x, self.eps), self.gate_up)), self.down)
