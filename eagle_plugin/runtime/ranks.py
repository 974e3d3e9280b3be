"""Lets the ranks of tensor parallelism agree: on one path per round, and on what their hosts found at start-up."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed

from eagle_plugin.common.errors import UserError
from eagle_plugin.core.verify import Accepted

_OURS = "eagle-plugin"  # beside what our gathers send


class OtherRankFailed(UserError):
    """Another rank has raised, and says why; nothing is known to be wrong with this one."""


class RankMissing(UserError):
    """This rank waits for another one in vain: it cannot go on, and nothing is known to be wrong with what it runs."""


@contextmanager
def raised_in_all_ranks(in_any_rank: Callable[[bool], bool]) -> Iterator[None]:
    """Around what can raise in one rank alone: then all ranks leave it by an exception, at the same place.

    Otherwise the rank that failed and the others would next gather values that do not belong together. in_any_rank: as
    `HostRanks.any`, called once. A UserError passes through at once.

    Raises:
        OtherRankFailed: in the ranks where nothing was raised.
    """
    error: Exception | None = None
    try:
        yield
    except UserError:
        raise
    except Exception as found:
        error = found
    if in_any_rank(error is not None):
        raise error or OtherRankFailed("another rank has failed; its log says why")


@contextmanager
def ended_in_all_ranks(context: AbstractContextManager[Any], in_any_rank: Callable[[bool], bool]) -> Iterator[None]:
    """In this context, whose end can raise in one rank alone (`raised_in_all_ranks`).

    What is raised before its end is to be raised in all ranks; but not `RankMissing`, after which the context is never
    ended, not even when the process ends: its end would wait for the same rank.
    """
    with ExitStack() as entered:
        entered.enter_context(context)
        try:
            yield
        except RankMissing:
            _keep_for_ever(entered.pop_all())
            raise
        with raised_in_all_ranks(in_any_rank):
            entered.pop_all().close()


def _keep_for_ever(value: Any) -> None:
    """Python ends a generator that nobody refers to by running its ``finally``, those of modules at the exit, too."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


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


class HostRanks:
    """What the hosts of an engine's ranks tell each other at start-up, and what only rank 0 says."""

    def __init__(self, group: Callable[[], Any]) -> None:
        """group: gives the engine's group once there is one; as for `RankAgreement`, with ``rank_in_group`` and
        ``cpu_group``."""
        self._group = group

    def gather(self, value: Any) -> list[Any]:
        """This host value of every rank, by rank; to be called by all of them. It waits: for start-up only.

        A rank that has failed may come here while the others are still in a gather of the engine's, in the same group
        (the addresses of captured buffers). What it gets then is theirs: it gathers again, until all values are ours.
        """
        group = self._group()
        if group.world_size == 1:
            return [value]
        while True:
            values: list[Any] = [None] * group.world_size
            distributed.all_gather_object(values, (_OURS, value), group=group.cpu_group)
            if all(isinstance(one, tuple) and one[:1] == (_OURS,) for one in values):
                return [one for _, one in values]

    def any(self, flag: bool) -> bool:
        """Whether a flag of the host is set in any rank; as `gather`."""
        return any(self.gather(flag))

    def logger(self, logger: logging.Logger) -> logging.Logger:
        """This logger in rank 0, a silent one in the others: all would say the same."""
        if self._group().rank_in_group == 0:
            return logger
        other = logger.getChild("other_ranks")
        other.disabled = True
        return other
