"""The P-EAGLE head: an EAGLE-3 head that drafts all levels in one pass."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle_plugin.heads.draft_head import DraftHead, NewHeadOptions, Roots, StoredHead
from eagle_plugin.heads.eagle3 import Eagle3Head
from eagle_plugin.heads.files import HeadError, read_mask_token
from eagle_plugin.heads.mask_token import mask_token_of_new
from eagle_plugin.heads.target_files import TargetFiles

if TYPE_CHECKING:
    from typing_extensions import Self


STD = 0.02  # of new features of a masked row


class PEagleHead(Eagle3Head):
    """Parallel drafting (arXiv 2602.01469): the rows of drafts 2..K are masked instead of waiting for drafts 1..K-1.

    Row 0 of a round is the EAGLE-3 row of the newest verified token. Row d >= 1 takes the embedding of `mask_token_id`
    and the state `mask_state()` at the next position, sees all verified rows and rows 0..d, and predicts the draft
    d + 1 places after the newest token. The recurrence of EAGLE-3 is never used.
    """

    kind = "peagle"
    mask_token_id: int

    def __init__(self, config: LlamaConfig, aux_layers: tuple[int, ...]) -> None:
        super().__init__(config, aux_layers)
        self.mask_token_id = int(config.mask_token_id)
        self.mask_hidden = nn.Parameter(torch.zeros(1, self.fc.in_features))

    def mask_state(self) -> Tensor:
        """As in the base class: the learnt features, through the same norms and fc as real ones."""
        return self.fuse(self.mask_hidden)

    def list_levels(self, roots: Roots, steps: int) -> Tensor:
        b, masks = len(roots.tokens), steps - 1
        tokens = torch.full((b, masks), self.mask_token_id, device=roots.tokens.device)
        causal = torch.ones(masks, masks, dtype=torch.bool, device=tokens.device).tril()
        states = self.read_after(roots, tokens, self.mask_state().expand(b, masks, -1), causal)
        return torch.cat([roots.states, states], 1)

    @classmethod
    def new_keys(cls, target: TargetFiles, ids: Tensor, options: NewHeadOptions) -> dict[str, Any]:
        token = mask_token_of_new(target.folder, target.vocab_size, ids.tolist(), options.mask_token_id)
        return super().new_keys(target, ids, options) | {"mask_token_id": token}

    @classmethod
    @torch.no_grad()
    def continue_head(
        cls, head: DraftHead, target: TargetFiles, layers: int, mask_token_id: int | None, generator: torch.Generator
    ) -> Self:
        """As in the base class, from an EAGLE-3 head."""
        if not isinstance(head, Eagle3Head) or isinstance(head, PEagleHead):
            return super().continue_head(head, target, layers, mask_token_id, generator)
        old = len(head.layers)
        if layers < old:
            raise HeadError(f"the head has {old} layers and {layers} are wanted; name {old} or more")
        ids = head.to_target(torch.arange(len(head.d2t)))
        keys = cls.new_keys(target, ids, NewHeadOptions(ids, "3.0", head.aux_layers, mask_token_id))
        config = copy.deepcopy(head.config)
        config.num_hidden_layers, config.mask_token_id = layers, keys["mask_token_id"]
        made = cls(config, head.aux_layers)
        made.mask_hidden.normal_(0.0, STD, generator=generator)
        state = dict(head.state_dict())
        hidden = config.hidden_size
        for name, tensor in [item for item in state.items() if item[0].startswith("layers.0.")]:
            part = name.removeprefix("layers.0.")
            if part == "input_layernorm.weight":  # of the embedding, which later layers do not read
                continue
            value = tensor[:, -hidden:] if part.startswith(("self_attn.q", "self_attn.k", "self_attn.v")) else tensor
            passes = part.startswith(("self_attn.o_proj", "mlp.down_proj"))
            for i in range(old, layers):
                state[f"layers.{i}.{part}"] = torch.zeros_like(value) if passes else value.clone()
        state["mask_hidden"] = made.mask_hidden.to(head.fc.weight.dtype)
        made.load_state_dict(state, assign=True)
        return made

    @classmethod
    def adapt_config(cls, config: dict[str, Any], raw: dict[str, Any], speculators: bool) -> None:
        config["mask_token_id"] = read_mask_token(raw)
        if speculators:  # its P-EAGLE does not have the newer norms
            config.setdefault("norm_before_residual", False)
            config |= {"fc_norm": False, "norm_output": False}

    @classmethod
    def find_unsupported(cls, config: dict[str, Any], weights: dict[str, Tensor]) -> str | None:
        if config["mask_token_id"] is None:
            return "mask_hidden but no mask_token_id; write the id it was trained with into config.json"
        return None

    @classmethod
    def from_checkpoint(cls, stored: StoredHead, dtype: torch.dtype | None) -> Self:
        stored.weights["mask_hidden"] = stored.weights["mask_hidden"].view(1, -1)
        return super().from_checkpoint(stored, dtype)

    def config_keys(self, target_dir: str | Path) -> dict[str, Any]:
        token = {"mask_token_id": self.mask_token_id, "ptd_token_id": self.mask_token_id}
        return super().config_keys(target_dir) | token
