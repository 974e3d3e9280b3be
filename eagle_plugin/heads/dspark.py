"""The DSpark head: a DFlash head whose lists depend on the token before; engines load it as `Qwen3DSparkModel`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle_plugin.heads.block_config import options_of, without_confidence
from eagle_plugin.heads.dflash import DFlashHead
from eagle_plugin.heads.draft_head import NewHeadOptions, StoredHead
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.target_files import TargetFiles

if TYPE_CHECKING:
    from typing_extensions import Self

RANK = 256  # of a new Markov head, or the hidden size where that is less
_OF_CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov")


class MarkovHead(nn.Module):
    """A bias of the logits after each token of the target: W_2 W_1[y], of low rank."""

    def __init__(self, vocab: int, draft_vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Linear(rank, vocab, bias=False)  # [vocab, rank], read row by row
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [..., n] of the target -> [..., n, draft vocabulary]."""
        bias: Tensor = self.markov_w2(F.embedding(tokens, self.markov_w1.weight))
        return bias


class DSparkHead(DFlashHead):
    """A block whose lists get a bias by the token before (DSpark).

        block after the root at position r:            rows E(x_r), E(mask), E(mask), .. at positions r, r + 1, ..
        q(x_{r+d} | x_{r+d-1}) = softmax(W_lm RMS(row d - 1) + W_2 W_1[x_{r+d-1}]),     d >= 1

    or with the row d, as DFlash has it, where the root's own row lists nothing (`sample_from_anchor` false). The
    confidence head that such a drafter may have is kept as it was stored; nothing here computes it.
    """

    kind = "dspark"

    def __init__(self, config: LlamaConfig, aux_layers: tuple[int, ...]) -> None:
        super().__init__(config, aux_layers)
        self.first_row = 0 if config.sample_from_anchor else 1
        self.markov_head = MarkovHead(config.vocab_size, len(self.d2t), int(config.markov_rank))
        self.confidence: dict[str, Tensor] = {}

    def logits_after(self, state: Tensor, tokens: Tensor) -> Tensor:
        bias: Tensor = self.markov_head(tokens)
        return self.logits(state) + bias

    def change_vocabulary(self, draft_ids: Tensor, target_lm_head: Tensor) -> int:
        raise HeadError("a dspark head is not trained here, so its vocabulary stays; leave the key out")

    @classmethod
    def create(cls, values: dict[str, Any], target: TargetFiles, options: NewHeadOptions) -> Self:
        own = {"markov_rank": min(RANK, target.hidden_size), "sample_from_anchor": True}
        return super().create(values | own, target, options)

    @classmethod
    def from_checkpoint(cls, stored: StoredHead, dtype: torch.dtype | None) -> Self:
        anchor = bool(options_of(stored.config)["sample_from_anchor"])
        stored = replace(stored, config=stored.config | {"sample_from_anchor": anchor})
        head = super().from_checkpoint(stored, dtype)
        computed = without_confidence(stored.weights)
        head.confidence = {name: tensor for name, tensor in stored.weights.items() if name not in computed}
        return head

    def config_keys(self, target_dir: str | Path) -> dict[str, Any]:
        values = super().config_keys(target_dir)
        values |= values.pop("dflash_config")  # published drafters have these at the top, where both engines read them
        return values | {
            "markov_rank": self.markov_head.markov_w1.in_features,
            "markov_head_type": "vanilla",
            "sample_from_anchor": self.first_row == 0,
            **{key: bool(self.confidence) and getattr(self.config, key, False) for key in _OF_CONFIDENCE},
        }

    def stored_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return super().stored_tensors(dtype) | self.confidence
