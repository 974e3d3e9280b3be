"""What both head architectures are made of: norm, attention over an explicit set of keys, MLP, and their loading.

Letters in shapes: ... any batch dimensions, n rows of this call, m rows of earlier calls, H hidden size, D head size.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eagle_plugin.heads.files import Algorithm, HeadError, Kind, read_config


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
    """Grouped-query attention with RoPE in which the caller says which row sees which key."""

    def __init__(self, config: LlamaConfig, width: int, *, bias: bool, output_bias: bool) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        self.head_dim = config.head_dim or config.hidden_size // heads
        q, kv = heads * self.head_dim, kv_heads * self.head_dim
        self.q_proj = nn.Linear(width, q, bias=bias)
        self.k_proj = nn.Linear(width, kv, bias=bias)
        self.v_proj = nn.Linear(width, kv, bias=bias)
        self.o_proj = nn.Linear(q, config.hidden_size, bias=output_bias)
        # A bound method, so that .to(dtype) leaves the inverse frequencies alone: rounded, they shift far positions.
        self.rotary = LlamaRotaryEmbedding(config).forward

    def forward(
        self, x: Tensor, positions: Tensor, visible: Tensor, past: KeyValues | None
    ) -> tuple[Tensor, KeyValues]:
        """Attend from n rows to m earlier rows and to each other.

        x [..., n, width], positions [..., n] int64, visible [..., n, m + n] bool (the earlier rows come first)
        -> output [..., n, H] and the keys and values of all m + n rows.
        """
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = self.rotary(x, positions)
        q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=-2)
        if past is not None:
            k, v = torch.cat([past.keys, k], -3), torch.cat([past.values, v], -3)
        out = F.scaled_dot_product_attention(
            q.transpose(-2, -3), k.transpose(-2, -3), v.transpose(-2, -3), visible.unsqueeze(-3), enable_gqa=True
        )
        return self.o_proj(out.transpose(-2, -3).flatten(-2)), KeyValues(k, v)


class DraftHead(nn.Module):
    """A draft head: what EAGLE-2 and EAGLE-3 have in common.

    Row j of a sequence takes the embedding of token j + 1 together with the target's features of token j, at RoPE
    position j (the shift of EAGLE, arXiv 2401.15077, section 3.1), and predicts token j + 2.
    """

    algorithm: Algorithm
    kind: Kind
    config: LlamaConfig
    fc: nn.Linear
    layers: nn.ModuleList
    aux_layers: tuple[int, ...] = ()  # target layers whose input is the feature; (): the target's last hidden state
    embedding: Tensor  # [V, H], frozen, shared with the target; in the target's dtype or the head's
    d2t: Tensor  # [draft vocabulary] int64, offset from a draft id to the target's id

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [..., n] int64, target ids -> [..., n, H] in the dtype of fc."""
        return F.embedding(tokens, self.embedding).to(self.fc.weight.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [..., n, F] -> the hidden states [..., n, H] that `forward` takes for verified tokens."""
        raise NotImplementedError

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        visible: Tensor,
        past: list[KeyValues] | None = None,
    ) -> tuple[Tensor, list[KeyValues]]:
        """Run the head on n rows.

        embeds, hidden [..., n, H]; positions [..., n] int64; visible [..., n, m + n] bool: which of the m rows of
        `past` and the n rows of this call a row attends to. A draft node must see the verified rows, its ancestors and
        itself. Returns (state [..., n, H], keys and values of all m + n rows a layer). The state of a row is the
        `hidden` of its children.
        """
        raise NotImplementedError

    def logits(self, state: Tensor) -> Tensor:
        """state [..., n, H] -> [..., n, draft vocabulary]."""
        raise NotImplementedError

    def to_target(self, tokens: Tensor) -> Tensor:
        """Draft-vocabulary ids -> target ids."""
        return tokens + self.d2t[tokens]


Head = TypeVar("Head", bound=DraftHead)


def read_llama_config(folder: str | Path, architecture: str) -> LlamaConfig:
    """Return the head's config.json as a LlamaConfig (which knows every RoPE variant).

    Raises:
        HeadError: the folder holds another architecture.
    """
    values = read_config(folder)
    if values.get("architectures", [None])[0] != architecture:
        raise HeadError(
            f"{folder} has architectures {values.get('architectures')}, wanted [{architecture!r}]; "
            "load it with the module of its own architecture"
        )
    return LlamaConfig(**values)


def fill(
    head: Head,
    weights: dict[str, Tensor],
    shared: dict[str, Tensor],
    dtype: torch.dtype | None,
    folder: str | Path,
) -> Head:
    """Put the tensors of the checkpoint in `folder` into a head, in dtype or that of the checkpoint's fc.

    Tensors already in that dtype are not copied, and the embedding keeps its own. shared: what the target lends
    (embedding, lm_head) by its name in the head's state dict; it wins over a tensor of the checkpoint. Tensors of the
    checkpoint that the module does not have are left out, as the engine does.

    Raises:
        HeadError: a tensor is missing or has another shape (`check_head` says which and why).
    """
    weights = dict(weights)
    weights["embedding"] = weights.pop("embed_tokens.weight", torch.empty(0))
    weights |= shared
    state = head.state_dict()
    if "d2t" in state:
        weights.setdefault("d2t", state["d2t"])  # none for a whole vocabulary: offset 0
    try:
        dtype = dtype or weights["fc.weight"].dtype
        kept = {name: weights[name] for name in state}
        cast = {name: w.to(dtype) if w.is_floating_point() else w.long() for name, w in kept.items()}
        head.load_state_dict(cast | {"embedding": kept["embedding"]}, assign=True)
    except (KeyError, RuntimeError) as error:
        raise HeadError(f"{folder} does not fit its config.json ({error}); run check_head for the details") from error
    return head
