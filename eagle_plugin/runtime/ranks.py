"""What the ranks of tensor parallelism do together, in both engines: one path for all of them."""

from __future__ import annotations

import logging
from typing import Any

import torch

from eagle_plugin.core.verify import Accepted


class RankAgreement:
    """Gives every rank of a group the accepted paths of its rank 0, by one broadcast per round.

    Ranks walk alike without it: the engine gathers the logits of all parts of the vocabulary, so that every rank has
    the same bits; keys are equal, and our kernels sum integers. The broadcast is for what that argument leaves out, a
    transform of the logits whose last bit depends on the device. Two ranks on different paths would add up partial
    results of different tokens from the next forward on, or wait for each other for ever.

    Trees are not broadcast: they are made of gathered logits and equal keys alone, without any transform.

    Everything that depends on the path (lengths, the move of keys and values, what the head reads) is to be derived
    from the answer.
    """

    def __init__(self, group: Any, requests: int, max_accept_length: int, device: torch.device | str) -> None:
        """group: the engine's group (``GroupCoordinator``) of ranks that serve the same requests: ``world_size`` and
        ``broadcast(tensor, src)`` are used. requests and max_accept_length (E) are the most of any round."""
        self._group = group
        # One buffer for the life of the worker: a captured broadcast has to find it at the same address.
        self._buffer = torch.zeros(requests * (2 * max_accept_length + 1), dtype=torch.int32, device=device)

    def agree(self, accepted: Accepted) -> Accepted:
        """The paths of rank 0, in new tensors; with one rank those given. To be called by all ranks, every round.

        No value is read by the host. On CUDA the broadcast runs on the current stream, between captured graphs or in
        one: NCCL's broadcast can be captured.
        """
        if self._group.world_size == 1:
            return accepted
        b, longest = accepted.index.shape
        packed = self._buffer[: b * (2 * longest + 1)].view(b, 2 * longest + 1)
        packed[:, :longest] = accepted.tokens  # ids of the target: they fit in 32 bits
        packed[:, longest:-1] = accepted.index
        packed[:, -1] = accepted.lengths
        self._group.broadcast(packed, src=0)
        return Accepted(
            index=packed[:, longest:-1].clone(memory_format=torch.contiguous_format),
            lengths=packed[:, -1].clone(memory_format=torch.contiguous_format),
            tokens=packed[:, :longest].long(),
        )


def silenced(logger: logging.Logger) -> logging.Logger:
    """A logger for the ranks after the first: all would say the same."""
    other = logger.getChild("other_ranks")
    other.disabled = True
    return other
