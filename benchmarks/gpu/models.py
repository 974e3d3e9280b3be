"""The models of the engine-free steps: a Llama of 8B shape with a head of its shape, and tiny ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.heads import Eagle3Head
from benchmarks.gpu.llama import Llama, Random
from benchmarks.gpu.steps import Setting
from benchmarks.roofline import DRAFT_VOCABULARY, LLAMA_8B, Decoder

TINY = Decoder(layers=4, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocabulary=512)


class Size(NamedTuple):
    """The shapes and dtype of a target and its head."""

    name: str
    model: Decoder
    aux_layers: tuple[int, ...]
    draft_vocabulary: int
    dtype: torch.dtype

    def target(self, positions: int, device: str, seed: int = 0) -> Llama:
        """The target with random weights of this seed, for so many positions."""
        return Llama(self.model, self.aux_layers, positions, Random(device, self.dtype, seed))

    def head(self, target: Llama, slot_table: Tensor, seed: int = 1) -> Eagle3Head:
        """The head with random weights of this seed."""
        return Eagle3Head(target, self.draft_vocabulary, slot_table, Random(target.device, self.dtype, seed))


SMALL = Size("tiny Llama", TINY, (1, 2, 3), 128, torch.float32)
LARGE = Size("Llama-3.1-8B shape", LLAMA_8B, (2, 16, 29), DRAFT_VOCABULARY, torch.bfloat16)


def size_for(setting: Setting) -> Size:
    """What a step measures in this setting."""
    return SMALL if setting.tiny else LARGE
