"""The DFlash head: a block drafter that vLLM and SGLang load as `DFlashDraftModel`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle_plugin.heads.block_config import block_rows, is_causal, mask_token_of, options_of
from eagle_plugin.heads.draft_head import DraftHead, NewHeadOptions, Roots, StoredHead
from eagle_plugin.heads.files import HeadError, text_config
from eagle_plugin.heads.filling import copy_if_alike, fill
from eagle_plugin.heads.layers import MLP, Attention, KeyValues, RMSNorm
from eagle_plugin.heads.mask_token import mask_token_of_new
from eagle_plugin.heads.other_layouts import partial_rotation, rope_sections
from eagle_plugin.heads.target_config import read_target_config, refuse_scaled_embedding
from eagle_plugin.heads.target_files import TargetFiles
from eagle_plugin.heads.target_table import default_aux_layers
from eagle_plugin.heads.vocabulary import check_draft_ids, with_vocabulary

if TYPE_CHECKING:
    from typing_extensions import Self

BLOCK_SIZE = 8  # rows of a new drafter's block where nothing says how many


class BlockLayer(nn.Module):
    """A layer of Qwen3, without biases."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, hidden, bias=False, output_bias=False, norms=True)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, positions: Tensor, visible: Tensor, past: KeyValues | None
    ) -> tuple[Tensor, KeyValues]:
        attended, keys_values = self.self_attn(self.input_layernorm(x), positions, visible, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), keys_values


class DFlashHead(DraftHead):
    """A block that attends to the target's states (DFlash, arXiv 2602.06036).

        c_j = RMS(W_fc [s^a_j; s^b_j; s^c_j])          s^i = residual stream entering target layer i
        keys and values of token j, in every layer:    W_k c_j (normed, rotated to position j) and W_v c_j
        block after the root at position r:            rows E(x_r), E(mask), E(mask), .. at positions r, r + 1, ..
        q(x_{r+d}) = softmax(W_lm RMS(row d)),         d >= 1

    A row sees the tokens before the root, whose states the target has, and the whole block, or with `causal` the rows
    of the block up to its own. W_lm is the target's, or the head's own over a draft vocabulary.
    """

    kind = "dflash"
    first_row = 1  # of a block, which lists the first level
    norm: RMSNorm
    mask_token_id: int
    block_size: int

    def __init__(self, config: LlamaConfig, aux_layers: tuple[int, ...]) -> None:
        super().__init__()
        self.config, self.aux_layers = config, aux_layers
        hidden, vocab, own = config.hidden_size, config.vocab_size, getattr(config, "draft_vocab_size", None)
        self.mask_token_id, self.block_size = int(config.mask_token_id), int(config.block_size)
        self.causal = bool(getattr(config, "is_causal", False))
        self.input_norm = self.fc_norm = None
        self.fc = nn.Linear(len(aux_layers) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head: nn.Linear | None = None if own is None else nn.Linear(hidden, own, bias=False)
        self.embedding = nn.Buffer(torch.zeros(vocab, hidden))
        # Of the target, where the head has none of its own.
        self.target_lm_head = nn.Buffer(torch.zeros(vocab, hidden)) if own is None else None
        self.d2t = nn.Buffer(torch.zeros(own or vocab, dtype=torch.int64), persistent=own is not None)

    def set_window(self, window: int) -> None:
        raise HeadError(
            f"a window of {window} keys is for EAGLE-3 and P-EAGLE heads; a block drafter is trained without"
        )

    @torch.no_grad()
    def change_vocabulary(self, draft_ids: Tensor, target_lm_head: Tensor) -> int:
        if self.lm_head is None:
            return super().change_vocabulary(draft_ids, target_lm_head)
        self.lm_head, self.d2t, known = with_vocabulary(self.lm_head.weight, self.d2t, draft_ids, target_lm_head)
        self.config.draft_vocab_size = len(draft_ids)
        return known

    @property
    def own_lm_head(self) -> Tensor | None:
        return None if self.lm_head is None else self.lm_head.weight

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def read_text(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, list[KeyValues]]:
        context = self.hidden_norm(self.fuse(features))
        positions = torch.arange(len(features), device=features.device)
        return context, [self.block_layer(i).self_attn.keys_values(context, positions) for i in range(len(self.layers))]

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        visible: Tensor,
        past: list[KeyValues] | None = None,
    ) -> tuple[Tensor, list[KeyValues]]:
        """As in the base class, for rows of a block, which read no `hidden`; past: what `read_text` returned."""
        x, present = embeds, []
        for i in range(len(self.layers)):
            x, keys_values = self.block_layer(i)(x, positions, visible, past[i] if past else None)
            present.append(keys_values)
        return x, present

    def block_layer(self, i: int) -> BlockLayer:
        """Layer i."""
        layer = self.layers[i]
        assert isinstance(layer, BlockLayer)
        return layer

    def block_tokens(self, roots: Tensor, rows: int) -> Tensor:
        """The tokens [b, rows] of the blocks after roots [b]."""
        tokens = torch.full((len(roots), rows), self.mask_token_id, device=roots.device)
        tokens[:, 0] = roots
        return tokens

    def list_levels(self, roots: Roots, steps: int) -> Tensor:
        """As in the base class, of the block that the head was trained with; a longer one for more levels."""
        first = self.first_row
        tokens = self.block_tokens(roots.tokens, max(self.block_size, first + steps))
        seen = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device)
        embeds = self.embed(tokens)
        return self.read_after(roots, tokens, embeds, seen.tril() if self.causal else seen)[:, first : first + steps]

    def logits(self, state: Tensor) -> Tensor:
        weight = self.target_lm_head if self.lm_head is None else self.lm_head.weight
        assert weight is not None
        return F.linear(self.norm(state), weight)

    @classmethod
    def create(cls, values: dict[str, Any], target: TargetFiles, options: NewHeadOptions) -> Self:
        refuse_scaled_embedding(target.config, target.folder)
        aux = default_aux_layers(target.num_layers) if options.aux_layers is None else options.aux_layers
        check_read_layers(aux, target.num_layers)
        ids = torch.arange(target.vocab_size) if options.draft_ids is None else options.draft_ids
        check_draft_ids(ids, target.vocab_size)
        named, embedding = options.mask_token_id, target.embedding()
        token = mask_token_of_new(target.folder, target.vocab_size, ids.tolist(), named, embedding)
        block = options.block_size or BLOCK_SIZE
        if block < 2:
            raise HeadError(f"block_size is {block}, wanted 2 or more: the root and the drafted tokens")
        values = values | {"mask_token_id": token, "block_size": block, "is_causal": options.causal}
        if options.draft_ids is not None:
            values["draft_vocab_size"] = len(ids)
        head = cls(LlamaConfig(**values), aux)
        if options.window is not None:
            head.set_window(options.window)
        if options.draft_ids is None:
            head.target_lm_head = nn.Buffer(target.lm_head().float())
        head.d2t.copy_(ids - torch.arange(len(ids)))
        return head

    def start_from_target(self, target: TargetFiles) -> None:
        gain = target.gain(f"layers.{target.num_layers - 1}.input_layernorm.weight")
        copy_if_alike(self.hidden_norm.weight, gain)
        copy_if_alike(self.block_layer(0).input_layernorm.weight, gain)
        copy_if_alike(self.norm.weight, target.gain("norm.weight"))
        if self.own_lm_head is not None:
            copy_if_alike(self.own_lm_head, target.lm_head()[self.to_target(torch.arange(len(self.d2t)))])

    @classmethod
    def find_unsupported(cls, config: dict[str, Any], weights: dict[str, Tensor]) -> str | None:
        unread = {
            "attention_value_scale": options_of(config).get("attention_value_scale"),
            "is_neox_style": "false" if config.get("is_neox_style") is False else None,
            "logit_scale": config.get("logit_scale"),
            "mrope_section": rope_sections(config),
            "partial_rotary_factor": partial_rotation(config),
            "use_gemma_norm": "true" if config.get("use_gemma_norm") else None,
        }
        found = next((key for key, value in unread.items() if value not in (None, 1)), None)
        if found is not None:
            return f"{found}, which only an engine computes; serve it as it is"
        if config.get("target_hidden_size") not in (None, config["hidden_size"]):
            return "another hidden size than its target's, with which only an engine computes it; serve it as it is"
        if block_rows(config) is None:
            return "no block_size; write the rows of the block that it was trained with into config.json"
        biases = [name for name in weights if name.endswith(".bias")]
        return f"{biases[0]}, wanted a drafter without biases; serve it as it is" if biases else None

    @classmethod
    def from_checkpoint(cls, stored: StoredHead, dtype: torch.dtype | None) -> Self:
        config, target = dict(stored.config), stored.target
        own = stored.weights.get("lm_head.weight")
        config |= {"mask_token_id": mask_token_of(config), "block_size": block_rows(config)}
        config |= {"is_causal": is_causal(config), "draft_vocab_size": None if own is None else len(own)}
        config = {key: value for key, value in config.items() if key not in ("dflash_config", "model_type")}
        head, embedding = cls(LlamaConfig(**config), stored.interpretation.aux_layers), target.embedding()
        if (stored_embedding := stored.weights.get("embed_tokens.weight")) is not None:
            head.own_embedding = not torch.equal(stored_embedding, embedding.to(stored_embedding.dtype))
        shared = {} if head.own_embedding else {"embedding": embedding}
        if own is None:
            shared["target_lm_head"] = target.lm_head()
        return fill(head, stored.weights, shared, dtype, stored.folder)

    def config_keys(self, target_dir: str | Path) -> dict[str, Any]:
        layers = text_config(read_target_config(target_dir))["num_hidden_layers"]
        options = {"mask_token_id": self.mask_token_id, "target_layer_ids": [layer - 1 for layer in self.aux_layers]}
        values: dict[str, Any] = {
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_target_layers": layers,
            "dflash_config": options,
            # SGLang reads is_causal only beside these.
            "layer_types": ["full_attention"] * self.config.num_hidden_layers,
        }
        if self.causal:
            values["is_causal"] = True
        return values if self.own_lm_head is None else values | {"draft_vocab_size": len(self.d2t)}

    def stored_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        tensors, vocab = super().stored_tensors(dtype), self.config.vocab_size
        if self.own_lm_head is not None and len(self.d2t) < vocab:
            tensors["d2t"] = self.d2t.cpu().contiguous()
        if self.own_embedding:
            tensors["embed_tokens.weight"] = self.embedding.detach().to("cpu", dtype).contiguous()
        return tensors


def check_read_layers(aux: tuple[int, ...], count: int) -> None:
    """Raise HeadError unless aux are rising ids of the layers after which a target of so many layers is read."""
    rising = all(a < b for a, b in zip(aux, aux[1:], strict=False))
    if not aux or not rising or aux[0] < 1 or aux[-1] > count:
        raise HeadError(
            f"aux layers are {list(aux)}, wanted rising ids from 1 to {count} for a block drafter, which reads what "
            "the layer before each of them leaves; correct aux_layers"
        )
