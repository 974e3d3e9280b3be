"""The start of a decode round: what it reads of the engine's tables, copied into buffers of a fixed size."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.sampling import SamplingParams


class RoundStart(NamedTuple):
    """What a round of at most B requests reads; L is a request's committed length, U the positions after it."""

    prefix_lens: Tensor  # [B] int64: L
    requests: Tensor  # [B] int64: row of the engine's request table
    rng_keys: Tensor  # [B] int64: of the requests' random numbers
    slots: Tensor  # [B, U] int64: cache slots of the positions L .. L + U - 1
    table: Tensor  # [B, C] int32: cache slots of the positions 0 .. L + U - 1; what is after them has no meaning
    sampling: SamplingParams  # of B requests

    @classmethod
    def empty(cls, padded: int, reach: int, context: int, device: torch.device | str = "cpu") -> RoundStart:
        """Uninitialised buffers: B is `padded`, U is `reach`, C is `context`."""

        def whole(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int64, device=device)

        table = torch.empty(padded, context, dtype=torch.int32, device=device)
        sampling = SamplingParams.greedy(padded, device)
        return cls(whole(padded), whole(padded), whole(padded), whole(padded, reach), table, sampling)

    def window(self, first: int, count: int) -> Tensor:
        """The cache slots of `count` positions from L + first on, contiguous [B, count] int64."""
        if (first, count) == (0, self.slots.shape[1]):
            return self.slots
        # contiguous() alone would keep the gaps of a single column.
        return self.slots[:, first : first + count].clone(memory_format=torch.contiguous_format)


def start_round(
    out: RoundStart, lengths: Tensor, rows: Tensor, req_to_token: Tensor, rng_keys: Tensor, sampling: SamplingParams
) -> None:
    """Fill the buffers for b <= B requests; b .. B - 1 are padding requests.

    lengths [b] int64: L; rows [b] int64: rows of req_to_token [P, C'] int32, where C' may differ from C, and of
    rng_keys [P] int64; sampling of b requests. A position at C' or after it has slot 0, the engine's padding slot.

    A padding request has L = 1, row 0, key 0, slots 0, zeros in its table up to position U, and greedy sampling.
    """
    b, reach = len(lengths), out.slots.shape[1]
    context, width = req_to_token.shape[1], out.table.shape[1]
    out.prefix_lens[:b], out.prefix_lens[b:] = lengths, 1
    out.requests[:b], out.requests[b:] = rows, 0
    out.rng_keys[:b], out.rng_keys[b:] = rng_keys[rows], 0
    positions = lengths[:, None] + torch.arange(reach, device=lengths.device)
    slots = req_to_token[rows[:, None], positions.clamp(max=context - 1)].long()
    out.slots[:b], out.slots[b:] = slots.where(positions < context, 0), 0
    table, copied = torch.zeros_like(out.table), min(context, width)
    table[:b, :copied] = req_to_token[rows, :copied]
    is_read = torch.arange(width, device=lengths.device) < out.prefix_lens[:, None] + reach  # [B, C]
    out.table.copy_(table.where(is_read, out.table))
    padding = SamplingParams.greedy(len(out.requests) - b, lengths.device)
    for values, given, greedy in zip(out.sampling, sampling, padding, strict=True):
        values[:b], values[b:] = given, greedy
