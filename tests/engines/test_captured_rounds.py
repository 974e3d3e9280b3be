"""Functions of rounds, captured by the graph emulator for the batch sizes that memory allows, and replayed or not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.shapes import captured_shapes
from eagle_plugin.runtime import graph_memory
from eagle_plugin.runtime.captured_rounds import CapturedRounds, FunctionKey, coarse_first
from eagle_plugin.runtime.capturing import capturer_for, gpu_sizes
from eagle_plugin.runtime.graph_memory import GraphMemory
from eagle_plugin.runtime.graphs import Buckets
from eagle_plugin.runtime.round import Drafts, HeadState, TopM
from eagle_plugin.runtime.round_memory import OneRequest, RoundMemory

SHAPE = Shape(2, 2, 4)
LIKE = OneRequest(
    logits=torch.zeros(1, 6),
    features=torch.zeros(1, 3),
    state=HeadState(TopM(torch.zeros(1, 5), torch.zeros(1, 5, dtype=torch.int64)), torch.zeros(1, 3)),
    drafts=Drafts.plain(torch.zeros(1, dtype=torch.int64), SHAPE.width),
)
LOGGER = logging.getLogger("test")


class Doubled(CapturedRounds[RoundMemory]):
    """Its one function doubles the roots of a round."""

    def __init__(self, fits: int = 8, graphs_fit: int = 8, **memory_options: Any) -> None:
        """fits: requests that the memory has room for; graphs_fit: those that the graphs have room for beside it."""
        super().__init__()
        self._fits, self._graphs_fit = fits, graphs_fit
        memory = GraphMemory("cpu", bool, LOGGER, "--memory", "--most-requests", **memory_options)
        with capturer_for(self, "cpu", LOGGER) as self.capturer:
            self._capture_sizes([SHAPE], [1, 2, 4, 8], memory, self._allocate, self._capture_size)

    def _allocate(self, most: int, rows: int) -> RoundMemory:
        if most > self._fits:
            raise torch.OutOfMemoryError("no memory")
        assert rows == most * SHAPE.width
        return RoundMemory(SHAPE, most, LIKE, rows)

    def _capture_size(self, padded_b: int) -> None:
        key: FunctionKey = "double", padded_b, SHAPE, None
        self.functions.capture(self.capturer, key, lambda: self._memory.view("roots", padded_b) * 2)
        if padded_b > self._graphs_fit:
            raise torch.OutOfMemoryError("no memory")

    def run(self, roots: Tensor) -> Tensor:
        """The doubled roots, [b] int64, of a round of these."""
        b = len(roots)
        padded_b = self._buckets.of(b) or b
        key: FunctionKey = "double", padded_b, SHAPE, None
        if self._is_captured(key):
            self._memory.put_padded("roots", roots, padded_b, 7)
        found: Tensor = self._run(key, lambda: roots * 2)
        assert found[b:].tolist() == [14] * (padded_b - b)
        return found[:b]


@pytest.mark.parametrize(
    ("rounds", "sizes", "replays"),
    [
        (Doubled(), [8, 4, 2, 1], 8),
        (Doubled(fits=4), [4, 2, 1], 4),  # memory of the largest size that fits
        (Doubled(fits=0), [], 0),
        (Doubled(graphs_fit=4), [4, 2, 1], 4),  # what was captured of a size that is left out is not replayed
    ],
    ids=["all", "no memory for 8", "no memory", "no memory for the graphs of 8"],
)
def test_batches_are_padded_to_the_sizes_that_memory_allows(rounds: Doubled, sizes: list[int], replays: int) -> None:
    assert rounds.sizes() == sizes
    for b in range(1, 11):
        roots = torch.arange(b) + 100
        assert rounds.run(roots).tolist() == (roots * 2).tolist()
    assert rounds.functions.replays == replays


@pytest.mark.parametrize("out_of_memory", [5, 1], ids=["the fifth function", "the first function"])
def test_no_graph_of_a_size_that_is_left_out_is_kept(out_of_memory: int) -> None:
    """They hold memory that the captures of the smaller sizes need."""

    class Five(Doubled):
        """Five functions of each size; for the last ones of size 8 there is no memory."""

        def _capture_size(self, padded_b: int) -> None:
            assert not any(("double", 8, SHAPE, i) in self.functions for i in range(5))  # type: ignore[arg-type]
            for i in range(5):
                if padded_b == 8 and i == out_of_memory - 1:
                    raise torch.OutOfMemoryError("no memory")
                self.functions.capture(
                    self.capturer, ("double", padded_b, SHAPE, i), lambda: self._memory.view("roots", 1)
                )

    rounds = Five()
    assert rounds.sizes() == [4, 2, 1] and len(rounds.functions) == 3 * 5


class Tabled(CapturedRounds[RoundMemory]):
    """Captures nothing for some sizes and shapes, and notes the memory."""

    def __init__(self, caps: Shape, sizes: list[int], fits: int = 10**6) -> None:
        super().__init__()
        self.allocated: list[tuple[int, int]] = []  # requests and rows
        self._fits = fits
        self._capture_sizes(captured_shapes(caps), sizes, GraphMemory(), self._allocate, lambda size: None)

    def _allocate(self, most: int, rows: int) -> RoundMemory:
        self.allocated.append((most, rows))
        if most > self._fits:
            raise torch.OutOfMemoryError("no memory")
        return RoundMemory(SHAPE, 1, LIKE)

    def widths(self, b: int) -> list[int]:
        """Of the trees that b requests can have."""
        allowed = self.allowed(b)
        return [shape.width for shape in (self.shapes if allowed is None else allowed)]


def test_the_larger_a_batch_the_narrower_its_captured_trees() -> None:
    caps = Shape(6, 4, 64)
    rounds = Tabled(caps, [1, 2, 4, 8, 12, 16, 24, 32, 40, 48])
    assert rounds.widths(16) == [1, 2, 3, 4, 8, 8, 16, 64] and rounds.allowed(16) is None
    assert rounds.widths(17) == rounds.widths(40) == rounds.widths(48) == [1, 2, 3, 4, 8, 8, 16]
    assert rounds.allowed(49) is None, "without graphs any shape is as good as another"
    assert rounds.allocated == [(48, 1024)]
    assert rounds.widest()[5:7] == [[16, 64], [24, 16]]
    for shape in rounds.shapes:
        for b in range(1, 49):
            narrowed = rounds.narrowed(shape, b)
            assert narrowed == shape or narrowed.width < shape.width
            assert narrowed.width * (rounds._buckets.of(b) or 0) <= 1024
    rounds.narrows = False  # as with fixed shapes
    assert rounds.allowed(48) is None and rounds.narrowed(caps, 48) == caps


def test_plain_rounds_are_captured_for_every_size() -> None:
    rounds = Tabled(Shape(3, 4, 16), [1, 64, 128])
    assert rounds.widths(128) == [1, 2, 3, 4, 8] and rounds.widths(64) == [1, 2, 3, 4, 8, 16]
    wide = Tabled(Shape(3, 4, 16), [1, 512, 2048])
    assert wide.widths(2048) == [1] and wide.widths(300) == [1, 2] and wide.allocated == [(2048, 2048)]
    smaller = Tabled(Shape(3, 4, 16), [1, 512, 2048], fits=600)
    assert smaller.allocated == [(2048, 2048), (512, 1024)] and smaller.widths(512) == [1, 2]


def test_what_larger_batches_get_instead_of_a_shape() -> None:
    caps = Shape(3, 4, 16)
    rounds = Tabled(caps, [8, 64, 96, 256, 600])
    by_width = {shape.width: shape for shape in rounds.shapes}
    assert rounds.narrower(caps) == [(64, by_width[8]), (96, by_width[4]), (256, PLAIN), (600, caps)]
    assert rounds.narrower(by_width[4]) == [(256, PLAIN), (600, by_width[4])] and rounds.narrower(PLAIN) == []
    for shape in rounds.shapes:
        for b in range(1, 603):
            found = [narrower for above, narrower in rounds.narrower(shape) if b > above]
            assert (found[-1] if found else shape) == rounds.narrowed(shape, b)


def test_memory_of_fewer_rows_than_the_caps_have() -> None:
    """Of 8 requests, whose trees have 2 nodes, or 4 of the caps."""
    memory = RoundMemory(SHAPE, 8, LIKE, rows=16)
    assert memory.logits(8, 2).shape == (16, 6) and memory.tree(8, 2).tokens.shape == (8, 2)
    assert memory.accepted(8, 2).tokens.shape == (8, 2) and memory.accepted(4, 3).tokens.shape == (4, 3)
    assert memory.tree(4).tokens.shape == (4, 4) and memory.features(4).shape == (16, 3)
    with pytest.raises(RuntimeError):
        memory.tree(8)


def test_the_fix_that_the_log_names(caplog: pytest.LogCaptureFixture) -> None:
    Doubled(graphs_fit=4)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "no memory for the CUDA graphs of batches of 8 requests; those of more than 4 are" in record.getMessage()
    assert "a smaller --memory, or --most-requests 4" in record.getMessage()


@pytest.mark.parametrize(
    ("free", "sizes", "told"),
    [
        (0, [8, 4, 2, 1], ""),  # bytes per captured size, of 100
        (10, [8, 4, 2, 1], ""),
        (17, [8, 2, 1], "batches of 4 requests; they are padded to the next size"),
        (60, [8, 2, 1], "batches of 4 requests; they are padded to the next size"),  # 8, 2 and 1 are needed
    ],
)
def test_graphs_take_half_of_what_is_free(
    free: int, sizes: list[int], told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What they leave is for the prompts of requests; every batch keeps a captured size at most four times as large."""
    taken = [0]
    monkeypatch.setattr(graph_memory, "free_bytes", lambda kind: 100 - taken[0])

    class Measured(Doubled):
        def _capture_size(self, padded_b: int) -> None:
            super()._capture_size(padded_b)
            taken[0] += free

    assert Measured().sizes() == sizes
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == bool(told) and all(told in warning for warning in warnings)


@pytest.mark.parametrize(
    ("per_request", "per_graph", "sizes"),
    [
        (5, 4, [8, 4, 2, 1]),  # MB of the memory and of the graphs of a size, per request
        (100, 1, [4, 2, 1]),  # with the memory for 8 too little is left
        (50, 60, [4, 2, 1]),  # with the graphs of 8
        (5, 50, [8, 2, 1]),  # with those of 4, which lie between others
        (60, 32, [4, 2, 1]),  # with those of 1 beside those of 8
        (800, 1, []),
    ],
)
def test_what_a_step_of_the_engine_needs_stays_free(
    per_request: int,
    per_graph: int,
    sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """5 GB are free, of which a step needs 4.25; what is not captured in the end takes nothing."""
    tried: list[CapturedRounds[Any]] = []

    def free(kind: str) -> int:
        graphs = sum(key[1] for one in tried for key in one.functions._captured)
        memory = sum(one._memory.most for one in tried if hasattr(one, "_memory"))
        return 5000 - per_request * memory - per_graph * graphs

    class Measured(Doubled):
        def _allocate(self, most: int, rows: int) -> RoundMemory:
            tried[:] = [self]
            memory = super()._allocate(most, rows)
            memory.most = most
            return memory

    monkeypatch.setattr(graph_memory, "free_bytes", free)
    if per_graph == 1:  # static memory can be dropped, whatever a communicator keeps
        assert Measured(needed=4250, may_repeat=False).sizes() == sizes
        caplog.clear()
    found = Measured(needed=4250)
    assert found.sizes() == sizes and {key[1] for key in found.functions._captured} == set(sizes)
    assert free("cpu") >= 4250
    left_out = ", ".join(str(size) for size in (1, 2, 4, 8) if size not in sizes)
    assert [f"batches of {left_out} requests" in record.getMessage() for record in caplog.records] == [True] * bool(
        left_out
    )


def test_sizes_on_a_gpu() -> None:
    assert gpu_sizes(1) == [1] and gpu_sizes(6) == [1, 2, 3, 4, 6] and gpu_sizes(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    sizes = gpu_sizes(256)
    assert sizes == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    assert coarse_first(sizes[::-1])[:11] == [256, 64, 16, 4, 1, 128, 32, 8, 2, 224, 192]
    assert sorted(coarse_first(sizes[::-1])) == sizes


def test_no_batch_is_padded_far() -> None:
    """Where memory ended before the smaller sizes, their batches run without graphs."""
    buckets = Buckets([64, 128])
    assert [buckets.of(b) for b in (1, 3, 4, 64, 65, 128, 129)] == [None, None, 64, 64, 128, 128, None]
    assert Buckets([32, 64]).of(1) == 32  # still few rows


def test_captures_that_have_to_stay_are_not_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator may keep what was captured; there are no further ones where a step would have too little."""
    taken: list[int] = []
    monkeypatch.setattr(graph_memory, "free_bytes", lambda kind: 100 - 30 * len(taken))

    class Counted(Doubled):
        def _capture_size(self, padded_b: int) -> None:
            super()._capture_size(padded_b)
            taken.append(padded_b)

    assert Counted(needed=75, may_repeat=False).sizes() == [8] and taken == [8]
    taken.clear()
    assert Counted(needed=30, may_repeat=False).sizes() == [8, 2, 1] and taken == [8, 2, 1]  # more than half is taken
    taken.clear()
    assert Counted(needed=75).sizes() == [] and taken == [8]  # the control: here nothing gives memory back


def test_captures_are_made_anew_from_half_of_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from each size below it: a capture of all sizes at a distance takes seconds."""
    tried: list[int] = []
    monkeypatch.setattr(graph_memory, "free_bytes", lambda kind: 2)

    class Large(Doubled):
        def _allocate(self, most: int, rows: int) -> RoundMemory:
            tried.append(most)
            return RoundMemory(SHAPE, most, LIKE, rows)

        def _capture_size(self, padded_b: int) -> None:
            raise torch.OutOfMemoryError("no memory")

    rounds = Large(needed=1)
    tried.clear()
    rounds._capture_sizes([SHAPE], gpu_sizes(256), GraphMemory(needed=1), rounds._allocate, rounds._capture_size)
    assert tried == [256, 128, 64, 32, 16, 8, 4, 2, 1] and rounds.sizes() == []
