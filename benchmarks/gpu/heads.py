"""Draft heads of the engine-free round: one of EAGLE-3's shape, and one that agrees with the target now and then."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.llama import Cache, Layer, Llama, Random, Rotary, Rows, rms_norm


class Head(Protocol):
    """What the round asks of a head."""

    draft_to_target: Tensor | None  # [draft vocabulary] int64

    def read(self, features: Tensor) -> Tensor:
        """The target's aux states [N, 3 * H] as the hidden states that `forward` reads after an accepted token."""
        ...

    def forward(self, rows: Rows, hidden: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits and states of the rows `keep` names (None: of all) of the rows with hidden states [N, H]."""
        ...


class Eagle3Head:
    """The EAGLE-3 head of a Llama with random weights: fc, a layer over [embedding; hidden], its own lm_head."""

    def __init__(self, target: Llama, draft_vocabulary: int, slot_table: Tensor, random: Random) -> None:
        model = target.model._replace(layers=1)
        self._embedding = target.embedding
        self._fc = random.matrix(model.hidden, len(target.aux_layers) * model.hidden)
        self._layer = Layer(model, random, inputs=2 * model.hidden)
        self._hidden_norm, self._norm = random.ones(model.hidden), random.ones(model.hidden)
        self._lm_head = random.matrix(draft_vocabulary, model.hidden, gain=3.0)
        step = model.vocabulary // draft_vocabulary
        self.draft_to_target: Tensor | None = torch.arange(draft_vocabulary, device=random.device) * step
        self._rotary: Rotary = target.rotary
        self._cache = Cache.empty(model, slot_table, random.dtype)

    def read(self, features: Tensor) -> Tensor:
        """h = W_fc [aux states]."""
        return functional.linear(features, self._fc)

    def forward(self, rows: Rows, hidden: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """The state is the residual after the layer; the next level reads it as it is."""
        layer = self._layer
        embedded = rms_norm(self._embedding[rows.tokens], layer.attention_norm)
        both = torch.cat([embedded, rms_norm(hidden, self._hidden_norm)], -1)
        x = hidden + layer.attend(both, rows, self._cache, 0, self._rotary)
        x = x + layer.mlp(x)
        x = x if keep is None else x[keep]
        return functional.linear(rms_norm(x, self._norm), self._lm_head), x


class EchoHead:
    """The target again as its own head, with noise in its logits: it agrees with the target now and then.

    A head's row at position j reads token j + 1, so this model never sees the first token of a text: its logits differ
    from the target's also without noise.
    """

    draft_to_target: Tensor | None = None

    def __init__(self, target: Llama, slot_table: Tensor, noise: float) -> None:
        self._target, self._noise = target, noise
        self._cache = Cache.empty(target.model, slot_table, target.dtype)

    def read(self, features: Tensor) -> Tensor:
        """This head reads no hidden states; the round wants them to have H columns."""
        return features[:, : self._target.model.hidden]

    def forward(self, rows: Rows, hidden: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """The hidden states pass through."""
        logits, _ = self._target.forward(rows, self._cache)
        logits = logits + self._noise * torch.randn_like(logits)
        return (logits, hidden) if keep is None else (logits[keep], hidden[keep])
