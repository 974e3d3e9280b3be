"""Captures the functions of decode rounds for padded batches, and runs each by its graph where it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.path_sums import PathSums
from eagle_plugin.runtime.graph_memory import GraphMemory
from eagle_plugin.runtime.graphs import Buckets, CapturedFunctions
from eagle_plugin.runtime.round_memory import RoundMemory

# Rows (requests times nodes) of the largest captured round with drafts: the target's logits take 4 bytes per row and
# token of the vocabulary.
MAX_ROWS = 1024

Memory = TypeVar("Memory", bound=RoundMemory)

# What a function of a round was captured for: its phase, the size of the padded batch, the shape of the trees (or their
# width, where the rest does not matter), and whether all requests are greedy (None where it does not matter; of vLLM's
# "verify" with LoRA: whether it is one with adapters).
FunctionKey = tuple[str, int, Shape | int, bool | None]


class CapturedRounds(Generic[Memory]):
    """The functions of one worker's decode rounds.

    What was captured reads and writes static memory alone. A batch of b requests is padded to B, the next captured
    size; a batch beyond the largest one runs as it is. The larger a size, the fewer nodes the trees have that are
    captured for it; plain decoding is captured for every size. Results lie in memory that later rounds overwrite.
    """

    shapes: tuple[Shape, ...] = ()  # that were captured for some size
    narrows = True  # whether batches that are too large for the graphs of a shape get another one, instead of no graphs
    _memory: Memory  # once something was captured

    def __init__(self) -> None:
        self.functions = CapturedFunctions()
        self._buckets = Buckets([])
        self._path_sums: dict[Shape, PathSums] = {}  # by drafted shape: the graphs read them
        self._narrower: dict[Shape, list[tuple[int, Shape]]] = {}  # what `narrower` gives

    def sizes(self) -> list[int]:
        """The batch sizes that were captured, the largest first."""
        return list(self._buckets)

    def shapes_at(self, size: int) -> tuple[Shape, ...]:
        """Of the captured shapes those that are captured for this batch size."""
        return tuple(shape for shape in self.shapes if fits(shape, size))

    def allowed(self, b: int) -> tuple[Shape, ...] | None:
        """The shapes that a batch of b requests can have by graphs; None: all, or it has no graphs at all."""
        size = self._buckets.of(b)
        if size is None or not self.narrows or all(fits(shape, size) for shape in self.shapes):
            return None
        return self.shapes_at(size)

    def narrowed(self, shape: Shape, b: int) -> Shape:
        """This captured shape, or where b requests are too many for it, the widest one below it that they can have."""
        allowed = self.allowed(b)
        if allowed is None or shape in allowed:
            return shape
        return max((one for one in allowed if one.width <= shape.width), key=lambda one: one.width, default=PLAIN)

    def narrower(self, shape: Shape) -> list[tuple[int, Shape]]:
        """What batches have that are too large for this captured shape: (b, another shape), ascending.

        The other shape is that of batches of more than b requests, up to the b of the next pair.
        """
        found = self._narrower.get(shape)
        if found is None:  # asked every round
            found, below, last = self._narrower.setdefault(shape, []), 0, shape
            for size in reversed(self.sizes()):
                if (narrowed := self.narrowed(shape, size)) != last:
                    found.append((below, narrowed))
                below, last = size, narrowed
            if last != shape:
                found.append((below, shape))  # no graphs: any shape is as good as another
        return found

    def padded_b(self, b: int, shape: Shape) -> int:
        """The size of the padded batch of b requests: the next one, or b where this shape is not captured for it."""
        size = self._buckets.of(b)
        return size if size is not None and self._has_graphs(size, shape) else b

    @property
    def path_sums_by_shape(self) -> Mapping[Shape, PathSums]:
        """What was captured of path sums, by drafted shape."""
        return self._path_sums

    def widest(self) -> list[list[int]]:
        """The captured batch sizes with the most nodes of their trees, ascending: what was captured, in short."""
        return [[size, max(shape.width for shape in self.shapes_at(size))] for size in reversed(self.sizes())]

    def _capture_sizes(
        self,
        shapes: Sequence[Shape],
        sizes: Sequence[int],
        graph_memory: GraphMemory,
        allocate: Callable[[int, int], Memory],
        capture: Callable[[int], None],
    ) -> None:
        """Capture these shapes for these batch sizes, in place of what was captured before.

        allocate: makes the memory for up to so many requests and rows, as much as fits; capture: captures the functions
        of a size, of `shapes_at` it.
        """
        self.shapes, self._buckets, fitting = tuple(shapes), Buckets([]), Buckets([])
        self._clear()
        left = sorted(sizes, reverse=True)
        while left:
            largest = left.pop(0)
            buckets = Buckets([size for size in sizes if size <= largest])
            undo = graph_memory.mark()
            rows = max(n * shape.width for n in buckets for shape in self.shapes_at(n))
            with graph_memory.tried(buckets, largest, captures=False):
                self._memory = allocate(largest, rows)
            if largest in buckets:
                if self._capture_fitting(buckets, graph_memory, capture):
                    fitting = buckets
                    break
                left = [size for size in left if size <= largest // 2]  # captures take seconds: no small steps
            self._clear()
            undo()
        graph_memory.tell(set(sizes).difference(fitting), list(fitting))
        self._buckets = fitting

    def _capture_fitting(self, buckets: Buckets, graph_memory: GraphMemory, capture: Callable[[int], None]) -> bool:
        """Capture what fits of these sizes; whether the sizes at a distance leave what a step needs.

        Else the graphs of the largest, which are there already, take the place of theirs.
        """
        captured: list[int] = []
        coarse = spaced(list(buckets), 4)
        for size in coarse_first(list(buckets)):
            if size not in buckets:
                continue
            with graph_memory.tried(buckets, size):
                capture(size)
            if size in buckets:
                captured.append(size)
            else:
                if size in coarse and graph_memory.repeats:
                    return False
                self._forget(size)  # its graphs hold memory
            graph_memory.keep_rest_free(buckets, captured, coarse)
        return True

    def _clear(self) -> None:
        self._narrower.clear()
        self.functions.clear()
        vars(self).pop("_memory", None)

    def _forget(self, size: int) -> None:
        self.functions.forget(lambda key: key[1] == size)

    def _has_graphs(self, b: int, shape: Shape) -> bool:
        """Whether a padded batch of b requests with trees of this shape is one of those that were captured."""
        return b in self._buckets and shape in self.shapes and fits(shape, b)

    def _is_captured(self, key: FunctionKey) -> bool:
        return key[1] in self._buckets and key in self.functions

    def _run(self, key: FunctionKey, function: Callable[[], Any]) -> Any:
        return self.functions.run(key, function) if self._is_captured(key) else function()

    def _sums_of(self, drafted: Shape, scores: Tensor, shapes: Sequence[Shape]) -> PathSums:
        """The path sums of drafts with these scores, for a policy over these shapes."""
        if drafted not in self._path_sums:
            self._path_sums[drafted] = PathSums(drafted, shapes, scores.device, scores.shape[1])
        return self._path_sums[drafted]


def fits(shape: Shape, size: int) -> bool:
    """Whether rounds of this shape are captured for this batch size: those of up to `MAX_ROWS` rows, and plain ones."""
    return shape == PLAIN or size * shape.width <= MAX_ROWS


def coarse_first(sizes: Sequence[int]) -> list[int]:
    """The order of captures of these batch sizes, which descend: wherever memory ends, all batches have a size near.

    First those at a distance of four times, then of two, then the rest; each time from above, because smaller graphs
    fit into the memory that larger ones have used.
    """
    return list(dict.fromkeys(size for ratio in (4, 2, 1) for size in spaced(sizes, ratio)))


def spaced(sizes: Sequence[int], ratio: int) -> list[int]:
    """Of these sizes, which descend, the largest, each that is at most 1 / ratio of the last, and the smallest."""
    kept: list[int] = []
    for size in sizes:
        if not kept or size * ratio <= kept[-1] or size == sizes[-1]:
            kept.append(size)
    return kept
