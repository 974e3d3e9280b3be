"""SGLang's class for EAGLE-3 heads, which also keeps what the engine's drops in silence: a mask and a window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.models.registry import ModelRegistry
from torch import Tensor

from eagle_plugin.heads.files import HeadError, canonical_name, check_mask_token, read_mask_token
from eagle_plugin.heads.other_layouts import window_of
from eagle_plugin.runtime.parallel_levels import MaskRow


class Eagle3Head(LlamaForCausalLMEagle3):
    """The engine's class; `mask` is what masked rows read if the checkpoint is of a P-EAGLE head.

    A window of config.json counts where ``--speculative-draft-window-size`` names none.
    """

    mask: MaskRow | None = None
    _draft_window_size: int | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        window = window_of(vars(self.config))
        if window is not None and self._draft_window_size is None:
            self._draft_window_size = window - 1  # SGLang counts the keys before a row's own
            for layer in self.model.layers:
                layer.self_attn.attn.sliding_window_size = self._draft_window_size

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a checkpoint, or new weights in place of some of it.

        Raises:
            HeadError: a mask has features and no token, or a token and no features.
        """
        found: list[Tensor] = []
        super().load_weights(self._without_mask(weights, found))
        token = read_mask_token(dict(vars(self.config)))
        if found:
            self._set_mask(found[0], token)
        elif token is not None and self.mask is None:
            raise HeadError(
                f"the draft head has mask_token_id {token} in config.json and no tensor mask_hidden, wanted both for a "
                "P-EAGLE head and neither for an EAGLE-3 head; export the head again, or remove the key"
            )
        elif self.mask is not None:
            self.mask.hidden.copy_(self._fused())

    @staticmethod
    def _without_mask(weights: Iterable[tuple[str, Tensor]], found: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, values in weights:
            if canonical_name(name) == "mask_hidden":
                found.append(values)
            else:
                yield name, values

    def _set_mask(self, features: Tensor, token: int | None) -> None:
        weight, owner = self.model.fc.weight, "the draft head has mask_hidden and mask_token_id"
        token = check_mask_token(token, self.config.vocab_size, owner)
        if features.numel() != weight.shape[1]:
            raise HeadError(
                f"the draft head has mask_hidden of shape {list(features.shape)}, wanted [1, {weight.shape[1]}] as fc "
                "reads; export the head again"
            )
        self.mask_features = features.view(1, -1).to(weight.device, weight.dtype)
        if self.mask is None:
            self.mask = MaskRow(token, self._fused())
        else:
            self.mask.hidden.copy_(self._fused())  # in place: captured rounds read it

    @torch.no_grad()
    def _fused(self) -> Tensor:
        """The features of a mask as the model's forward fuses real ones, [1, H]."""
        model, x = self.model, self.mask_features
        if model.input_norm is not None:
            x = model.input_norm(x)
        if model.fc_norm is not None:
            chunks = x.chunk(model.num_aux_hidden_states, dim=-1)
            x = torch.cat([norm(part.contiguous()) for norm, part in zip(model.fc_norm, chunks, strict=True)], dim=-1)
        fused: Tensor = model.fc(x)
        return fused


def mask_of(model: Any) -> MaskRow | None:
    """What masked rows read if this loaded head is a P-EAGLE head, else None."""
    return getattr(model, "mask", None)


def register() -> None:
    """Let this process load EAGLE-3 heads with our class."""
    ModelRegistry.models[LlamaForCausalLMEagle3.__name__] = Eagle3Head
