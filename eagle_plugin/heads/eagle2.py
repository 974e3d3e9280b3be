"""The EAGLE head (EAGLE-2 drafts dynamic trees with the same weights)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle_plugin.heads.draft_head import DraftHead, NewHeadOptions, StoredHead
from eagle_plugin.heads.filling import fill
from eagle_plugin.heads.layers import MLP, Attention, KeyValues, RMSNorm
from eagle_plugin.heads.target_files import TargetFiles

if TYPE_CHECKING:
    from typing_extensions import Self


class DecoderLayer(nn.Module):
    """A Llama layer; the first one of a head reads fc's output without a norm."""

    def __init__(self, config: LlamaConfig, first: bool) -> None:
        super().__init__()
        bias = bool(config.attention_bias or getattr(config, "bias", False))
        self.input_layernorm = None if first else RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size, bias=bias, output_bias=bias)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, positions: Tensor, visible: Tensor, past: KeyValues | None
    ) -> tuple[Tensor, KeyValues]:
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        attended, keys_values = self.self_attn(normed, positions, visible, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), keys_values


class Eagle2Head(DraftHead):
    """Autoregression on the target's last hidden states f (arXiv 2401.15077, section 3.1; trees: arXiv 2406.16858).

        h_j = W_fc [E(x_{j+1}); f_j] + b_fc,    f'_{j+1} = Layers(h_<=j)_j,    q(x_{j+2}) = softmax(LMHead f'_{j+1})

    f is taken after the target's final norm; E and LMHead are the target's, frozen; f' replaces f at the next step.
    """

    kind = "eagle2"
    stored_biases = frozenset({"fc.bias"})

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        hidden, vocab = config.hidden_size, config.vocab_size
        self.fc = nn.Linear(2 * hidden, hidden)
        self.fc.bias.requires_grad_(False)  # vLLM has none: a trained one would be lost there
        self.input_norm = self.fc_norm = self.norm = None
        self.layers = nn.ModuleList(DecoderLayer(config, i == 0) for i in range(config.num_hidden_layers))
        self.embedding = nn.Buffer(torch.zeros(vocab, hidden))
        self.lm_head = nn.Buffer(torch.zeros(vocab, hidden))
        self.d2t = nn.Buffer(torch.zeros(vocab, dtype=torch.int64), persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        visible: Tensor,
        past: list[KeyValues] | None = None,
    ) -> tuple[Tensor, list[KeyValues]]:
        x = self.fc(torch.cat([embeds, hidden], -1))
        present = []
        for i, layer in enumerate(self.layers):
            x, keys_values = layer(x, positions, visible, past[i] if past else None)
            present.append(keys_values)
        return x, present

    def logits(self, state: Tensor) -> Tensor:
        return nn.functional.linear(state, self.lm_head)

    @classmethod
    def create(cls, values: dict[str, Any], target: TargetFiles, options: NewHeadOptions) -> Self:
        head = cls(LlamaConfig(**values))
        if options.window is not None:
            head.set_window(options.window)
        head.lm_head = nn.Buffer(target.lm_head().float())
        return head

    @classmethod
    def adapt_config(cls, config: dict[str, Any], raw: dict[str, Any], speculators: bool) -> None:
        if speculators:
            config.setdefault("norm_before_residual", False)

    @classmethod
    def find_unsupported(cls, config: dict[str, Any], weights: dict[str, Tensor]) -> str | None:
        width, wanted = weights["fc.weight"].shape[1], 2 * config["hidden_size"]
        if width != wanted:
            return (
                f"fc.weight with {width} inputs, wanted {wanted} in an EAGLE-2 head and layers.0.hidden_norm.weight in "
                "an EAGLE-3 head; copy the head again if it is one of EAGLE-3"
            )
        if "layers.0.input_layernorm.weight" in weights:
            return "a norm before its first layer, which no engine's EAGLE class computes; train a new head"
        return None

    @classmethod
    def from_checkpoint(cls, stored: StoredHead, dtype: torch.dtype | None) -> Self:
        # EAGLE-1 heads come with a bias of fc and without.
        weights = {"fc.bias": torch.zeros(stored.target.hidden_size)} | stored.weights
        shared = {"embedding": stored.target.embedding(), "lm_head": stored.target.lm_head()}
        return fill(cls(LlamaConfig(**stored.config)), weights, shared, dtype, stored.folder)
