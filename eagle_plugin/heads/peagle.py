"""The P-EAGLE head: an EAGLE-3 head that drafts all positions in one pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle_plugin.heads.eagle3 import Eagle3Head
from eagle_plugin.heads.files import Kind


class PEagleHead(Eagle3Head):
    """Parallel drafting (arXiv 2602.01469): the rows of drafts 2..K are masked instead of waiting for drafts 1..K-1.

    Row 0 of a round is the EAGLE-3 row of the newest verified token. Row d >= 1 takes the embedding of `mask_token_id`
    and the state `mask_state()` at the next position, sees all verified rows and rows 0..d, and predicts the draft
    d + 1 places after the newest token. The recurrence of EAGLE-3 is never used.
    """

    kind: Kind = "peagle"

    def __init__(self, config: LlamaConfig, aux_layers: tuple[int, ...]) -> None:
        super().__init__(config, aux_layers)
        self.mask_token_id = int(config.mask_token_id)
        self.mask_hidden = nn.Parameter(torch.zeros(1, self.fc.in_features))

    def mask_state(self) -> Tensor:
        """The hidden state [1, H] of a masked row: the learnt features through the same norms and fc as real ones."""
        return self.fuse(self.mask_hidden)
