"""A round from its drafting to its verification, as the chooser of shapes hears of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.served_rounds import ServedRound
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.vllm.batch import DraftStore, RoundBatch
from eagle_plugin.vllm.shapes import RoundShapes, clock_of_rounds
from eagle_plugin.vllm.tree_steps import TreeSteps

CAPS = Shape(2, 2, 4)
SMALL = Shape(1, 1, 2)


class Heard(ShapeChooser):
    """Notes its calls; the next shape is given."""

    def __init__(self) -> None:
        super().__init__(CAPS, None)
        self.calls: list[tuple[Any, ...]] = []
        self.tokens: list[tuple[int, int]] = []
        self.pending: list[int] = []
        self.drafting: list[Any] = []  # in the order of the calls
        self.next = CAPS

    def choose(self, b: int, keys: int, allowed: Any = None, pending: int = 0, drafting: int | None = None) -> Shape:
        self.calls.append(("choose", b, keys))
        self.pending.append(pending)
        self.drafting.append(drafting)
        return self.next

    def begin(self, shape: Shape, b: int, keys: int) -> None:
        self.calls.append(("begin", shape, b, keys))

    def end_round(self, arrived: int = 0) -> None:
        self.calls.append(("end", arrived))

    def pause(self) -> None:
        self.calls.append(("pause",))

    def launched(
        self, shape: Shape, b: int, keys: int, drafts: Drafts, sum_up: Any = None, drafting: Any = None
    ) -> ServedRound:
        self.calls.append(("launched", shape, b, keys, drafts.scores is not None))
        self.drafting.append(drafting)
        return ServedRound(shape, b, keys)

    def observe_tokens(self, prompt: int, output: int) -> None:
        self.tokens.append((prompt, output))

    def observe(self, served: ServedRound, kept: Any, drafted: Any = None) -> None:
        self.calls.append(("observe", served, list(kept)))
        self.drafting.append(drafted)


class Worker:
    """Steps of a worker without an engine."""

    def __init__(self) -> None:
        self.heard, self.store = Heard(), DraftStore()
        self.shapes = RoundShapes(self.heard)

    def schedule(self, names: str, counts: list[int], lens: list[int], keys: int = 50) -> RoundBatch:
        prefix = torch.zeros(len(names), dtype=torch.int64)
        batch = RoundBatch.read(np.array(counts), np.array(lens), list(names), prefix, self.store)
        self.shapes.scheduled(batch, keys, sum(lens) - sum(counts) - len(names))
        return batch

    def draft(self, batch: RoundBatch, names: str, whole: bool = True) -> Shape:
        shape = self.shapes.choose(batch)
        self.shapes.begin(shape, batch)
        drafts = Drafts.plain(torch.zeros(batch.b), shape.width)._replace(shape=shape, scores=torch.zeros(batch.b, 3))
        self.shapes.launched(batch, drafts, whole)
        self.store.put(list(names), drafts)
        return shape

    def calls(self) -> list[tuple[Any, ...]]:
        found, self.heard.calls = self.heard.calls, []
        return found


@pytest.fixture
def worker() -> Worker:
    """Two requests have read their prompts, and have drafts of the caps."""
    made = Worker()
    made.draft(made.schedule("ab", [0, 0], [20, 30]), "ab")
    assert made.calls() == [
        ("pause",),
        ("choose", 2, 50),
        ("begin", CAPS, 2, 50),
        ("launched", CAPS, 2, 50, True),
    ]
    return made


def test_a_round_is_observed_in_the_step_that_verifies_it(worker: Worker) -> None:
    batch = worker.schedule("ab", [3, 3], [4, 4], keys=54)
    worker.heard.next = SMALL
    worker.draft(batch, "ab")
    worker.shapes.observe([3, 1])
    assert worker.calls() == [
        ("choose", 2, 54),
        ("begin", SMALL, 2, 54),
        ("launched", SMALL, 2, 54, True),
        ("observe", ServedRound(CAPS, 2, 50), [2, 0]),
    ]
    worker.schedule("ab", [1, 1], [2, 2], keys=58)
    worker.shapes.observe([1, 2])
    assert worker.calls() == [("observe", ServedRound(SMALL, 2, 54), [0, 1])]


def test_plain_rounds_go_on_without_a_pause(worker: Worker) -> None:
    worker.heard.next = PLAIN
    for drafted in (3, 0, 0):
        worker.draft(worker.schedule("ab", [drafted] * 2, [drafted + 1] * 2), "ab")
        assert [name for name, *_ in worker.calls()] == ["choose", "begin", "launched"]
    worker.heard.next = CAPS
    worker.draft(worker.schedule("ab", [0, 0], [1, 9]), "ab")
    assert worker.calls()[0] == ("pause",)


def test_prompt_tokens_and_output_tokens_of_a_step_are_told(worker: Worker) -> None:
    """A chunk of 9 rows draws one token at most; drafts are no prompt."""
    worker.schedule("abc", [3, 3, 0], [4, 4, 9])
    worker.shapes.observe([2, 1, 0])
    worker.schedule("ab", [0, 0], [1, 1])
    worker.shapes.observe([1, 1])
    assert worker.heard.tokens == [(8, 3), (0, 2)]


def test_what_the_head_has_to_read_is_told_per_request(worker: Worker) -> None:
    worker.shapes.choose(worker.schedule("abc", [0, 0, 0], [1, 1, 9]), 100)
    assert worker.heard.pending[-1] == 34


def test_requests_without_drafts_are_told_apart() -> None:
    """Of three the second has none; the first misses the step."""
    worker = Worker()
    batch = worker.schedule("abc", [0, 0, 0], [2, 3, 4])
    shape = worker.shapes.choose(batch, drafting=2)
    drafts = Drafts.plain(torch.zeros(3), shape.width)._replace(shape=shape)
    worker.shapes.launched(batch, drafts, True, drafting=[0, 2])
    worker.store.put(list("abc"), drafts)
    batch = RoundBatch.read(np.array([3, 3]), np.array([4, 4]), list("bc"), torch.zeros(2).long(), worker.store)
    worker.shapes.scheduled(batch, 50, 0, [1])
    worker.shapes.observe([1, 3])
    assert worker.calls()[-1][2] == [0, 2] and worker.heard.drafting == [2, [0, 2], [2]]


def test_a_request_that_ended_leaves_the_round_its_time_and_the_others_are_observed(worker: Worker) -> None:
    worker.schedule("b", [3], [4])
    worker.shapes.observe([2])
    assert worker.calls() == [("observe", ServedRound(CAPS, 2, 50), [1])]


def test_requests_that_came_stop_the_clock(worker: Worker) -> None:
    """One whose prompt has one token left, in the place of another that ended."""
    worker.schedule("bc", [3, 0], [4, 1])
    assert worker.calls() == [("pause",)]


@pytest.mark.parametrize(
    ("names", "counts", "lens", "kept"),
    [
        ("abc", [3, 3, 0], [4, 4, 9], [1, 2]),  # a prompt
        ("ab", [3, 1], [4, 2], [1]),  # a tree that was cut
    ],
)
def test_what_is_not_a_whole_round(
    names: str, counts: list[int], lens: list[int], kept: list[int], worker: Worker
) -> None:
    worker.schedule(names, counts, lens)
    worker.shapes.observe([2, 3, 0])
    assert worker.calls() == [("pause",), ("observe", ServedRound(CAPS, 2, 50), kept)]


def test_a_step_without_drafting_ends_the_round(worker: Worker) -> None:
    """Past the drafter's reach vLLM schedules zeros, as many as the caps have: they are no drafts."""
    worker.schedule("ab", [3, 3], [4, 4])
    worker.shapes.observe([1, 1])
    assert len(worker.calls()) == 1
    worker.schedule("ab", [3, 3], [4, 4])
    worker.shapes.observe([1, 1])
    assert worker.calls() == [("pause",)]


def test_nothing_is_observed_twice(worker: Worker) -> None:
    worker.schedule("ab", [3, 3], [4, 4])
    worker.shapes.observe([1, 1])
    worker.shapes.observe([1, 1])
    assert len(worker.calls()) == 1


@pytest.mark.parametrize("rows", [0, 5])
def test_what_the_head_reads_after_plain_rounds_is_no_part_of_the_last_one(rows: int) -> None:
    """Else plain rounds that are served to be compared would seem slower than they are."""
    heard = Heard()
    steps = SimpleNamespace(
        _deferred=SimpleNamespace(rows_of_requests=rows),
        _shapes=RoundShapes(heard),
        _read_deferred=lambda names: heard.calls.append(("read", *names)),
    )
    TreeSteps._catch_up(cast(TreeSteps, steps), ["a", "b"])
    assert heard.calls == [("end", 0), ("read", "a", "b")][not rows :]


def test_unread_prompts_tell_no_scores(worker: Worker) -> None:
    worker.draft(worker.schedule("ab", [3, 3], [4, 4]), "ab", whole=False)
    assert worker.calls()[-1] == ("launched", CAPS, 2, 50, False)


def test_a_step_scheduled_ahead_is_observed_in_the_next_one(worker: Worker) -> None:
    """What trees yielded is known then, of a plain step at once; nothing is observed twice."""
    worker.shapes.observe([1, 1])
    first = worker.schedule("ab", [3, 3], [4, 4])
    worker.shapes.observe_step_before([1, 1])
    assert worker.heard.tokens == [(48, 2)]
    worker.draft(first, "ab")
    worker.heard.next = PLAIN
    second = worker.schedule("ab", [3, 3], [4, 4], 60)
    worker.shapes.observe_step_before([3, 1])
    assert worker.calls()[-1] == ("observe", ServedRound(CAPS, 2, 50), [2, 0])
    worker.draft(second, "ab")
    third = worker.schedule("ab", [0, 0], [1, 1], 64)
    worker.shapes.observe_step_before([2, 4])
    assert worker.calls()[-1] == ("observe", ServedRound(CAPS, 2, 50), [1, 3])
    worker.draft(third, "ab")
    worker.shapes.observe([1, 1])
    worker.schedule("ab", [0, 0], [1, 1], 66)
    worker.shapes.observe_step_before([1, 1])
    assert worker.heard.tokens == [(48, 2), (0, 4), (0, 6), (0, 2)]


@pytest.mark.parametrize(
    ("engines", "ranks", "ahead", "timed"),
    [(1, 1, False, True), (1, 2, False, False), (1, 2, True, True), (2, 1, False, False), (2, 1, True, False)],
)
def test_rounds_are_timed_where_their_times_are_their_own(engines: int, ranks: int, ahead: bool, timed: bool) -> None:
    """Engines that share experts wait for each other in every forward: for the prompts of others, too."""
    parallel = SimpleNamespace(data_parallel_size=engines)
    served = SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=parallel), device=torch.device("cpu"), use_async_scheduling=ahead
    )
    assert (clock_of_rounds(served, ranks) is not None) == timed


class Counted(ShapeChooser):
    """Notes what it may choose from."""

    def __init__(self, shapes: list[Shape]) -> None:
        super().__init__(CAPS, None, shapes)
        self.allowed: list[Any] = []

    def choose(self, b: int, prefix_tokens: int, allowed: Any = None, *more: Any) -> Shape:
        self.allowed.append(allowed)
        return super().choose(b, prefix_tokens, allowed, *more)


def test_only_shapes_that_are_captured_for_the_batch_are_chosen() -> None:
    """Trees of the caps for one request, plain rounds for three; the user's limits hold besides."""
    captured = {1: None, 2: (PLAIN, SMALL), 3: (PLAIN,)}
    batches = [
        RoundBatch.read(
            np.zeros(b, int), np.ones(b, int), list("abc"[:b]), torch.zeros(b, dtype=torch.int64), DraftStore()
        )
        for b in (1, 2, 3)
    ]
    for limits, wanted in (
        (None, [None, (PLAIN, SMALL), (PLAIN,)]),
        ([0, 1, 3, 3], [[PLAIN, SMALL], (PLAIN, SMALL), (PLAIN,)]),
        ([0, 3, 0, 1], [None, [PLAIN], [PLAIN]]),
    ):
        chooser = Counted([PLAIN, SMALL, CAPS])
        shapes = RoundShapes(chooser, limits, captured.get)
        for batch in batches:
            shapes.choose(batch)
        assert chooser.allowed == wanted


def test_limits_by_the_size_of_the_batch() -> None:
    """Any request may have 3 drafts alone, 1 beside another one, and none in a batch of three."""
    limits, store = [0, 3, 1, 0], DraftStore()
    batches = [
        RoundBatch.read(np.zeros(b, int), np.ones(b, int), list("abc"[:b]), torch.zeros(b, dtype=torch.int64), store)
        for b in (1, 2, 3, 2)
    ]
    chooser = Counted([PLAIN, SMALL, CAPS])
    shapes = RoundShapes(chooser, limits)
    for batch in batches:
        shapes.choose(batch)
    assert chooser.allowed == [None, [PLAIN, SMALL], [PLAIN], [PLAIN, SMALL]]
    assert chooser.allowed[1] is chooser.allowed[3]  # the policy sees that they are the same
    fixed = RoundShapes(ShapeChooser(CAPS, None), limits)
    assert [fixed.choose(batch) for batch in batches] == [CAPS, SMALL, PLAIN, SMALL]
    assert [fixed.choose(batch, drafting=0) for batch in batches] == [PLAIN] * 4
    assert [RoundShapes(ShapeChooser(CAPS, None)).choose(batch) for batch in batches] == [CAPS] * 4
