"""The GPU memory that captured rounds may take: which batch sizes have graphs, and what the log says of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from eagle_plugin.runtime.graphs import Buckets
from eagle_plugin.runtime.ranks import raised_in_all_ranks

LOGGER = logging.getLogger("eagle_plugin")


class GraphMemory:
    """What is free when the captures begin; the graphs get half of it, because long prompts need memory later.

    A few sizes at a distance have theirs all the same, as long as what a step needs is free.

    A size has graphs in all ranks or in none: what a graph sends to the other ranks goes over other channels than
    without graphs.
    """

    def __init__(
        self,
        kind: str = "cpu",
        in_any_rank: Callable[[bool], bool] = bool,
        logger: logging.Logger = LOGGER,
        memory_flag: str = "",
        batch_flag: str = "",
        *,
        mark: Callable[[], Callable[[], Any]] = lambda: lambda: None,
        needed: int = 0,
        may_repeat: bool = True,
    ) -> None:
        """kind: of the device. The flags are the engine's for the memory that it takes, and for the largest batch.

        mark: called before captures; if they are dropped, its answer is called, to undo what else they did in this
        rank. needed: bytes that a step of the engine takes for a time, as far as it knows; they stay free. may_repeat:
        whether captures may be dropped that have succeeded, to leave them free; else there are no further ones.
        """
        self._kind, self._in_any_rank, self._logger = kind, in_any_rank, logger
        self._flags, self.mark = (memory_flag, batch_flag), mark
        self._least_free = max(self._free() // 2, needed)
        self._needed, self._may_repeat = needed, may_repeat

    @contextmanager
    def tried(self, buckets: Buckets, size: int, *, captures: bool = True) -> Iterator[None]:
        """Around allocations or captures of one size: it leaves the buckets if they run out of memory in any rank, or
        leave less than a step needs.

        captures: whether anything is captured, which may have to stay. What else is raised in one rank ends the
        captures of all of them (`raised_in_all_ranks`).
        """
        out_of_memory, undo = False, self.mark()
        with raised_in_all_ranks(self._in_any_rank):
            try:
                yield
            except torch.OutOfMemoryError:
                out_of_memory = True
        can_be_dropped = self._may_repeat or not captures
        if self._in_any_rank(out_of_memory or (can_be_dropped and self._leaves_too_little())):
            buckets.drop(size)
            undo()

    @property
    def repeats(self) -> bool:
        """Whether captures are made anew, without the largest size, where those of another leave too little."""
        return self._may_repeat and self._needed > 0

    def keep_rest_free(self, buckets: Buckets, captured: Collection[int], coarse: Collection[int]) -> None:
        """After captures: all sizes but these leave the buckets if the graphs have taken their half.

        Those at a distance, which are not captured yet, leave them too where captures have to stay, and leave less than
        a step needs.
        """
        if self._in_any_rank(self._free() < self._least_free):
            kept = {*captured, *coarse}
            if not self._may_repeat and self._in_any_rank(self._leaves_too_little()):
                kept = {*captured}
            for size in [size for size in buckets if size not in kept]:
                buckets.drop(size)

    def tell(self, left_out: Collection[int], captured: Collection[int]) -> None:
        """A warning about the sizes that were left out; captured: the others."""
        if not left_out:
            return
        (memory_flag, batch_flag), largest = self._flags, max(captured, default=0)
        self._logger.warning(
            "eagle-plugin: there is no memory for the CUDA graphs of batches of %s requests; %s; give the server a "
            "smaller %s",
            ", ".join(map(str, sorted(left_out))),
            "they are padded to the next size that has graphs"
            if max(left_out) < largest
            else f"those of more than {largest} are served without graphs",
            memory_flag + (f", or {batch_flag} {largest}" if 0 < largest < max(left_out) else ""),
        )

    def _leaves_too_little(self) -> bool:
        return self._needed > 0 and self._free() < self._needed

    def _free(self) -> int:
        if self._kind == "cuda":
            torch.cuda.empty_cache()  # what torch keeps of earlier steps is there for later ones
        return free_bytes(self._kind)


def free_bytes(kind: str) -> int:
    """The memory of the current GPU that is free; 0 on other devices."""
    return torch.cuda.mem_get_info()[0] if kind == "cuda" else 0
