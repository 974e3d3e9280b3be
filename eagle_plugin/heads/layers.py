"""The parts of all heads: norm, MLP, and attention over an explicit set of keys.

Letters in shapes: ... any batch dimensions, n rows of this call, m rows of earlier calls, H hidden size, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half


class KeyValues(NamedTuple):
    """Keys (after RoPE) and values of one layer."""

    keys: Tensor  # [..., m, kv_heads, D]
    values: Tensor  # [..., m, kv_heads, D]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Grouped-query attention with RoPE in which the caller says which row attends to which key."""

    def __init__(self, config: LlamaConfig, width: int, *, bias: bool, output_bias: bool, norms: bool = False) -> None:
        """width: of the rows that are read; norms: whether queries and keys are normed, as in Qwen3."""
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        self.head_dim = config.head_dim or config.hidden_size // heads
        q, kv = heads * self.head_dim, kv_heads * self.head_dim
        self.q_proj = nn.Linear(width, q, bias=bias)
        self.k_proj = nn.Linear(width, kv, bias=bias)
        self.v_proj = nn.Linear(width, kv, bias=bias)
        self.o_proj = nn.Linear(q, config.hidden_size, bias=output_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if norms else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if norms else None
        # A bound method and no submodule, so that .to(dtype) does not round the inverse frequencies, which would shift
        # far positions.
        self.rotary = LlamaRotaryEmbedding(config).forward

    def forward(
        self, x: Tensor, positions: Tensor, visible: Tensor, past: KeyValues | None
    ) -> tuple[Tensor, KeyValues]:
        """Attend from n rows to m earlier rows and to each other.

        x [..., n, width], positions [..., n] int64, visible [..., n, m + n] bool (the earlier rows come first)
        -> output [..., n, H] and the keys and values of all m + n rows.
        """
        q = self._rotate(self._project(self.q_proj, x), self.q_norm, positions)
        k, v = self.keys_values(x, positions)
        if past is not None:
            k, v = torch.cat([past.keys, k], -3), torch.cat([past.values, v], -3)
        out = F.scaled_dot_product_attention(
            q.transpose(-2, -3), k.transpose(-2, -3), v.transpose(-2, -3), visible.unsqueeze(-3), enable_gqa=True
        )
        return self.o_proj(out.transpose(-2, -3).flatten(-2)), KeyValues(k, v)

    def keys_values(self, x: Tensor, positions: Tensor) -> KeyValues:
        """Those of rows x [..., n, width] at positions [..., n] alone."""
        keys = self._rotate(self._project(self.k_proj, x), self.k_norm, positions)
        return KeyValues(keys, self._project(self.v_proj, x))

    def _project(self, projection: nn.Linear, x: Tensor) -> Tensor:
        """[..., n, heads, D]."""
        return projection(x).unflatten(-1, (-1, self.head_dim))

    def _rotate(self, x: Tensor, norm: RMSNorm | None, positions: Tensor) -> Tensor:
        x = x if norm is None else norm(x)
        cos, sin = (part.unsqueeze(-2) for part in self.rotary(x, positions))
        return x * cos + rotate_half(x) * sin
