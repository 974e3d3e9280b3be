"""The EAGLE-3 head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle_plugin.heads.draft_head import DraftHead, NewHeadOptions, StoredHead
from eagle_plugin.heads.files import HeadError, text_config
from eagle_plugin.heads.filling import copy_if_alike, fill
from eagle_plugin.heads.layers import MLP, Attention, KeyValues, RMSNorm
from eagle_plugin.heads.new_config import NORM_KEYS, window_keys
from eagle_plugin.heads.other_layouts import window_of
from eagle_plugin.heads.target_config import read_target_config
from eagle_plugin.heads.target_files import TargetFiles
from eagle_plugin.heads.target_table import are_layers, default_aux_layers, engines_default, sglang_ids, sglang_layers
from eagle_plugin.heads.vocabulary import check_draft_ids, with_vocabulary

if TYPE_CHECKING:
    from typing_extensions import Self


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
    norms each s, `norm_before_fc` their concatenation, `norm_output` gives RMS(state) to the next step in place of the
    state, and `layer_types` with `sliding_window` lets a row see the last keys alone.
    """

    kind = "eagle3"
    norm: RMSNorm
    lm_head: nn.Linear

    def __init__(self, config: LlamaConfig, aux_layers: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        self.aux_layers = aux_layers
        hidden, eps, aux = config.hidden_size, config.rms_norm_eps, len(aux_layers)
        self.target_hidden_size = target_hidden = getattr(config, "target_hidden_size", None) or hidden
        draft_vocab = config.draft_vocab_size or config.vocab_size
        eagle = getattr(config, "eagle_config", None) or {}

        self.fc = nn.Linear(aux * target_hidden, hidden, bias=bool(getattr(config, "bias", False)))
        self.input_norm = None
        if eagle.get("norm_before_fc", getattr(config, "norm_before_fc", False)):
            self.input_norm = RMSNorm(aux * target_hidden, eps)
        self.fc_norm = None
        if getattr(config, "fc_norm", None) or getattr(config, "use_aux_norm", False):
            self.fc_norm = nn.ModuleList(RMSNorm(target_hidden, eps) for _ in range(aux))
        self.layers = nn.ModuleList(DecoderLayer(config, i == 0) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps)
        self.norm_output = bool(getattr(config, "norm_output", False))
        self.window = window_of(vars(config))
        self.lm_head = nn.Linear(hidden, draft_vocab, bias=False)
        self.embedding = nn.Buffer(torch.zeros(config.vocab_size, hidden))
        self.d2t = nn.Buffer(torch.zeros(draft_vocab, dtype=torch.int64))

    @property
    def own_lm_head(self) -> Tensor:
        return self.lm_head.weight

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

    @classmethod
    def create(cls, values: dict[str, Any], target: TargetFiles, options: NewHeadOptions) -> Self:
        aux = default_aux_layers(target.num_layers) if options.aux_layers is None else options.aux_layers
        _check_aux_layers(target, aux)
        ids = torch.arange(target.vocab_size) if options.draft_ids is None else options.draft_ids
        check_draft_ids(ids, target.vocab_size)
        values = values | NORM_KEYS[options.norms] | cls.new_keys(target, ids, options)
        values |= window_keys(options.window, values["num_hidden_layers"])
        head = cls(LlamaConfig(**values), aux)
        head.d2t.copy_(ids - torch.arange(len(ids)))
        return head

    @classmethod
    def new_keys(cls, target: TargetFiles, ids: Tensor, options: NewHeadOptions) -> dict[str, Any]:
        """The keys of a new head's config that this kind has beside those of all heads; ids: the draft vocabulary."""
        return {"draft_vocab_size": len(ids), "target_hidden_size": target.hidden_size}

    def start_from_target(self, target: TargetFiles) -> None:
        first: Any = self.layers[0]
        input_norm = target.gain(f"layers.{target.num_layers - 1}.input_layernorm.weight")
        lm_head = target.lm_head()[self.to_target(torch.arange(len(self.d2t)))]
        for parameter, value in (
            (first.hidden_norm.weight, input_norm),
            (self.norm.weight, target.gain("norm.weight")),
            (self.lm_head.weight, lm_head),
        ):
            copy_if_alike(parameter, value)
        # Drawn columns would outweigh the last state, the more the wider the target is.
        self.fc.weight[:, : -self.target_hidden_size] = 0.0
        # The copied layer adds what fits a residual of the target's scale, which a norm before fc has taken out, and a
        # drawn layer adds noise: the state passes both until training moves them.
        is_normed = self.fc_norm is not None or self.input_norm is not None
        passing: list[Any] = list(self.layers)[0 if is_normed else 1 :]
        for layer in passing:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()

    def set_window(self, window: int) -> None:
        self.window = window

    @torch.no_grad()
    def change_vocabulary(self, draft_ids: Tensor, target_lm_head: Tensor) -> int:
        self.lm_head, self.d2t, known = with_vocabulary(self.lm_head.weight, self.d2t, draft_ids, target_lm_head)
        self.config.draft_vocab_size = len(draft_ids)
        return known

    @classmethod
    def adapt_config(cls, config: dict[str, Any], raw: dict[str, Any], speculators: bool) -> None:
        if speculators:
            config.setdefault("norm_before_residual", True)

    @classmethod
    def from_checkpoint(cls, stored: StoredHead, dtype: torch.dtype | None) -> Self:
        config, weights, target = dict(stored.config), dict(stored.weights), stored.target
        aux = stored.interpretation.aux_layers
        _merge_layer_norms(weights, config["num_hidden_layers"], stored.folder)
        config["norm_output"] = stored.interpretation.norm_output
        tied = config.pop("tie_word_embeddings", False)
        if config.get("draft_vocab_size") is None:
            weights.setdefault("lm_head.weight", target.embedding() if tied else target.lm_head())
            config["draft_vocab_size"] = len(weights["lm_head.weight"])
        if len(aux) * target.hidden_size != weights["fc.weight"].shape[1]:
            raise HeadError(
                f"{stored.folder} has fc.weight with {weights['fc.weight'].shape[1]} inputs, wanted "
                f"{target.hidden_size} for each of its {len(aux)} aux layers; use the head trained for this target"
            )
        if "d2t" not in weights and config["draft_vocab_size"] != target.vocab_size:
            raise HeadError(
                f"{stored.folder} drafts from {config['draft_vocab_size']} of {target.vocab_size} tokens but has no "
                "d2t, wanted the tensor that maps them to the target's ids; copy the head again with all its files"
            )
        head = cls(LlamaConfig(**config), aux)
        is_narrower = config["hidden_size"] != target.hidden_size
        if is_narrower and "embed_tokens.weight" not in weights:
            raise HeadError(
                f"{stored.folder} has hidden_size {config['hidden_size']}, the target {target.hidden_size}, and no "
                "embed_tokens.weight, wanted the head's own embedding; copy the head again with all its files"
            )
        shared = {} if is_narrower else {"embedding": target.embedding()}
        return fill(head, weights, shared, dtype, stored.folder)

    def config_keys(self, target_dir: str | Path) -> dict[str, Any]:
        target = read_target_config(target_dir)
        architecture = (target.get("architectures") or ["?"])[0]
        layers = text_config(target)["num_hidden_layers"]
        eagle: dict[str, Any] = {"use_aux_hidden_state": True}
        values: dict[str, Any] = {
            "target_hidden_size": self.target_hidden_size,
            "draft_vocab_size": len(self.d2t),
            "norm_before_residual": False,  # only vLLM has it; True is its default for some formats
            "fc_norm": self.fc_norm is not None,
            "norm_before_fc": self.input_norm is not None,
            "norm_output": self.norm_output,
            "num_aux_hidden_states": len(self.aux_layers),
            **window_keys(self.window, self.config.num_hidden_layers),
        }
        default = engines_default(layers)
        if self.aux_layers != default or sglang_layers(architecture, None, layers) != default:
            # vLLM reads the first key and SGLang the second; the same layers have other numbers there.
            values["eagle_aux_hidden_state_layer_ids"] = list(self.aux_layers)
            eagle["eagle_aux_hidden_state_layer_ids"] = sglang_ids(architecture, self.aux_layers, layers)
        return values | {"eagle_config": eagle}

    def stored_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = super().stored_tensors(dtype)
        for i in range(1, self.config.num_hidden_layers):
            # The same norm: SGLang calls it hidden_norm in layers after the first, vLLM input_layernorm.
            tensors[f"layers.{i}.input_layernorm.weight"] = tensors[f"layers.{i}.hidden_norm.weight"].clone()
        vocab = self.config.vocab_size
        if len(self.d2t) < vocab:  # vLLM refuses the tables of a head that drafts from the whole vocabulary
            d2t = self.d2t.cpu().contiguous()
            known = torch.zeros(vocab, dtype=torch.bool)
            known[d2t + torch.arange(len(d2t))] = True
            tensors |= {"d2t": d2t, "t2d": known}
        if self.target_hidden_size != self.config.hidden_size:
            tensors["embed_tokens.weight"] = self.embedding.detach().to("cpu", dtype).contiguous()
        return tensors


def _check_aux_layers(target: TargetFiles, aux: tuple[int, ...]) -> None:
    """Raise HeadError unless aux are layers of the target in rising order that SGLang can capture."""
    if not are_layers(aux, target.num_layers):
        raise HeadError(
            f"aux layers are {list(aux)}, wanted rising ids from 1 to {target.num_layers - 1} for a target with "
            f"{target.num_layers} layers; correct aux_layers"
        )
    sglang_ids(target.architecture, aux, target.num_layers)


def _merge_layer_norms(weights: dict[str, Tensor], layers: int, folder: Path) -> None:
    """One name for the first norm of layers after the first: SGLang reads hidden_norm, vLLM input_layernorm."""
    for i in range(1, layers):
        ours, other = f"layers.{i}.hidden_norm.weight", f"layers.{i}.input_layernorm.weight"
        if ours not in weights and other in weights:
            weights[ours] = weights[other]
        elif other in weights and not torch.equal(weights[ours], weights[other]):
            raise HeadError(
                f"{folder} has different {ours} and {other}, of which SGLang reads the first and vLLM the second; "
                "train a new head"
            )
