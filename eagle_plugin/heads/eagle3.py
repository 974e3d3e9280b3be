"""The EAGLE-3 head."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle_plugin.heads.files import Kind, load_weights
from eagle_plugin.heads.layers import MLP, Attention, DraftHead, KeyValues, RMSNorm, fill, read_llama_config

ARCHITECTURE = "LlamaForCausalLMEagle3"


class DecoderLayer(nn.Module):
    """A Llama layer whose first instance reads the embedding beside the hidden state; the residual is the latter."""

    def __init__(self, config: LlamaConfig, first: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps) if first else None
        self.hidden_norm = RMSNorm(hidden, eps)
        # SGLang builds q, k, v of this head without a bias whatever the config says.
        output_bias = bool(config.attention_bias or getattr(config, "bias", False))
        self.self_attn = Attention(config, 2 * hidden if first else hidden, bias=False, output_bias=output_bias)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(config)

    def forward(
        self, embeds: Tensor, x: Tensor, positions: Tensor, visible: Tensor, past: KeyValues | None
    ) -> tuple[Tensor, KeyValues]:
        normed = self.hidden_norm(x)
        if self.input_layernorm is not None:
            normed = torch.cat([self.input_layernorm(embeds), normed], -1)
        attended, keys_values = self.self_attn(normed, positions, visible, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), keys_values


class Eagle3Head(DraftHead):
    """Direct token prediction from fused low, middle and high target features (arXiv 2503.01840, section 3.1).

        g_j = [s^a_j; s^b_j; s^c_j]             s^i = residual stream entering target layer i; default 2, L//2, L-3
        h_j = W_fc g_j                          for verified tokens; a drafted token takes its parent's state instead
        state_j = Layer([RMS(E(x_{j+1})); RMS(h_j)]) + residual h_j,    q(x_{j+2}) = softmax(W_lm RMS(state_j))

    W_lm is the head's own over the draft vocabulary; target id = draft id + d2t. Options of the checkpoint: `fc_norm`
    norms each s, `norm_before_fc` their concatenation, and `norm_output` hands on RMS(state) in place of the state.
    """

    algorithm = "EAGLE3"
    kind: Kind = "eagle3"

    def __init__(self, config: LlamaConfig, aux_layers: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        self.aux_layers = aux_layers
        hidden, eps, aux = config.hidden_size, config.rms_norm_eps, len(aux_layers)
        self.target_hidden_size = target_hidden = getattr(config, "target_hidden_size", None) or hidden
        draft_vocab = config.draft_vocab_size or config.vocab_size
        eagle = getattr(config, "eagle_config", None) or {}

        self.fc = nn.Linear(aux * target_hidden, hidden, bias=bool(getattr(config, "bias", False)))
        self.input_norm: RMSNorm | None = None
        if eagle.get("norm_before_fc", getattr(config, "norm_before_fc", False)):
            self.input_norm = RMSNorm(aux * target_hidden, eps)
        self.fc_norm: nn.ModuleList | None = None
        if getattr(config, "fc_norm", None) or getattr(config, "use_aux_norm", False):
            self.fc_norm = nn.ModuleList(RMSNorm(target_hidden, eps) for _ in range(aux))
        self.layers = nn.ModuleList(DecoderLayer(config, i == 0) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps)
        self.norm_output = bool(getattr(config, "norm_output", False))
        self.lm_head = nn.Linear(hidden, draft_vocab, bias=False)
        self.embedding = nn.Buffer(torch.zeros(config.vocab_size, hidden))
        self.d2t = nn.Buffer(torch.zeros(draft_vocab, dtype=torch.int64))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        aux_layers: tuple[int, ...],
        embedding: Tensor,
        lm_head: Tensor,
        dtype: torch.dtype | None = None,
    ) -> Eagle3Head:
        """Load a checkpoint folder.

        aux_layers as in `HeadInfo.aux_layer_ids`; embedding and lm_head [V, H] are the target's.

        The target's embedding is used unless the head has another hidden size; its lm_head where config.json has
        draft_vocab_size null, or ties the head's lm_head to the embedding.

        Raises:
            HeadError: the folder holds another architecture or lacks a tensor.
        """
        config = read_llama_config(folder, ARCHITECTURE)
        head = cls(config, aux_layers)
        shared = {}
        if config.hidden_size == (getattr(config, "target_hidden_size", None) or config.hidden_size):
            shared["embedding"] = embedding
        if config.tie_word_embeddings:
            shared["lm_head.weight"] = embedding
        elif config.draft_vocab_size is None:
            shared["lm_head.weight"] = lm_head
        return fill(head, load_weights(folder, "EAGLE3"), shared, dtype, folder)

    def fuse(self, features: Tensor) -> Tensor:
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        visible: Tensor,
        past: list[KeyValues] | None = None,
    ) -> tuple[Tensor, list[KeyValues]]:
        present = []
        for i, layer in enumerate(self.layers):
            hidden, keys_values = layer(embeds, hidden, positions, visible, past[i] if past else None)
            present.append(keys_values)
        return (self.norm(hidden) if self.norm_output else hidden), present

    def logits(self, state: Tensor) -> Tensor:
        return self.lm_head(state if self.norm_output else self.norm(state))
