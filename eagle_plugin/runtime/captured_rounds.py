"""Captures the functions of decode rounds for padded batches, and runs each by its graph where it has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.path_sums import PathSums
from eagle_plugin.runtime.graphs import Buckets, CapturedFunctions
from eagle_plugin.runtime.round_memory import RoundMemory

Memory = TypeVar("Memory", bound=RoundMemory)
# Of the captures of one batch size: a context, which may drop the size from the buckets.
Around = Callable[[Buckets, int], AbstractContextManager[Any]]

# What a function of a round was captured for: its phase, the size of the padded batch, the shape of the trees (or their
# width, where the rest does not matter), and whether all requests are greedy (None where it does not matter; of vLLM's
# "verify" with LoRA: whether it is one with adapters).
FunctionKey = tuple[str, int, Shape | int, bool | None]


class CapturedRounds(Generic[Memory]):
    """The functions of one worker's decode rounds.

    What was captured reads and writes static memory alone. A batch of b requests is padded to B, the next captured
    size; a batch beyond the largest one runs as it is. Results lie in memory that later rounds overwrite.
    """

    _memory: Memory  # once something was captured

    def __init__(self) -> None:
        self.functions = CapturedFunctions()
        self._buckets = Buckets([])
        self._path_sums: dict[Shape, PathSums] = {}  # by drafted shape: the graphs read them

    def sizes(self) -> list[int]:
        """The batch sizes that were captured, the largest first."""
        return list(self._buckets)

    def _capture_sizes(
        self, sizes: list[int], around: Around, allocate: Callable[[int], Memory], capture: Callable[[int], None]
    ) -> None:
        """Capture for these batch sizes, in place of what was captured before.

        allocate: makes the memory for a size, the largest one that fits; capture: captures the functions of a size.
        """
        buckets = Buckets(sizes)
        self.functions.clear()
        self._buckets = Buckets([])
        for size in list(buckets):
            with around(buckets, size):
                self._memory = allocate(size)
            if size in buckets:
                break
        for size in list(buckets):
            with around(buckets, size):
                capture(size)
        self._buckets = buckets

    def _is_captured(self, key: FunctionKey) -> bool:
        return key[1] in self._buckets and key in self.functions

    def _run(self, key: FunctionKey, function: Callable[[], Any]) -> Any:
        return self.functions.run(key, function) if self._is_captured(key) else function()

    def _sums_of(self, drafted: Shape, scores: Tensor, shapes: Sequence[Shape]) -> PathSums:
        """The path sums of drafts with these scores, for a policy over these shapes."""
        if drafted not in self._path_sums:
            self._path_sums[drafted] = PathSums(drafted, shapes, scores.device, scores.shape[1])
        return self._path_sums[drafted]
