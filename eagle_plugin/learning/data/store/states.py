"""The two forms in which a feature store keeps hidden states: bfloat16, or float8 with a scale per token and layer.

float8 (e4m3) has 3 bits of mantissa, so a value is rounded by at most 1/16 of itself; one below 2^-14 of the largest of
its token and layer by more, and below 2^-18 it can become 0. One scale for several layers would lose more: the states
of deep layers are many times larger than those of the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0  # of float8_e4m3fn


def to_float8(states: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
    """Round states [n, L * H] of L layers to float8_e4m3fn [n, L * H] and their scales float32 [n, L]."""
    layers = states.float().view(len(states), -1, hidden)
    scales = layers.abs().amax(-1) / LARGEST
    scales = torch.where(scales == 0, 1.0, scales)  # not where they are NaN: what is no number stays none
    return (layers / scales[..., None]).to(torch.float8_e4m3fn).view(states.shape), scales


def from_float8(values: Tensor, scales: Tensor) -> Tensor:
    """The states [n, L * H] bfloat16 of float8_e4m3fn values [n, L * H] and scales float32 [n, L]."""
    layers = values.to(torch.bfloat16).view(*scales.shape, -1)  # exactly: it has more bits of both kinds
    # torch multiplies in float32 and rounds once; in place, because a GPU then makes no tensor of float32.
    return layers.mul_(scales.unsqueeze(-1)).view(values.shape)


def expand(aux: Tensor | None, last: Tensor, scales: Tensor) -> tuple[Tensor | None, Tensor]:
    """aux [n, A * H] and last [n, H] in bfloat16, of float8_e4m3fn and scales float32 [n, A + 1], on their device."""
    of_aux, of_last = scales.split([scales.shape[1] - 1, 1], dim=1)
    return None if aux is None else from_float8(aux, of_aux), from_float8(last, of_last)
