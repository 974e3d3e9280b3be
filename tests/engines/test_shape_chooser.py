"""What the shape chooser tells the policy of served rounds, and when."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from policy_recorder import CAPS, CHAIN, Recorder, drafts_of
from policy_world import device

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.chooser import (
    SUM_ROUNDS,
    PolicyModeError,
    ShapeChooser,
    buffers_of,
    policy_mode,
)
from eagle_plugin.policy.costs import CostModel, size_class
from eagle_plugin.policy.path_sums import PathSums
from eagle_plugin.policy.policy import Policy
from eagle_plugin.policy.prediction_errors import class_of
from eagle_plugin.policy.round_times import HostClock
from eagle_plugin.policy.shapes import shapes_within
from eagle_plugin.runtime.round import Drafts


def clock_of(*times: float) -> Iterator[float]:
    return iter(times)


@pytest.mark.parametrize(("value", "mode"), [(None, "auto"), ("", "auto"), ("fixed", "fixed"), ("random", "random")])
def test_mode(value: str | None, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLE_POLICY", raising=False)
    if value is not None:
        monkeypatch.setenv("EAGLE_POLICY", value)
    assert policy_mode() == mode


def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_POLICY", "best")
    with pytest.raises(PolicyModeError, match="'best', wanted one of auto, fixed, random"):
        policy_mode()


def test_fixed_shapes_are_the_caps() -> None:
    chooser = ShapeChooser(CAPS, None)
    assert {chooser.choose(b, 0) for b in range(1, 100)} == {CAPS}
    assert chooser.choose(1, 0, frozenset({PLAIN, CHAIN})) == PLAIN
    assert chooser.choose(1, 0, frozenset({PLAIN, CAPS})) == CAPS


def test_random_shapes_are_the_same_in_every_rank() -> None:
    shapes = shapes_within(CAPS)
    ranks = [ShapeChooser(CAPS, None, shapes) for _ in range(2)]
    chosen = [[rank.choose(1, 0) for _ in range(500)] for rank in ranks]
    assert chosen[0] == chosen[1] and set(chosen[0]) == set(shapes)
    allowed = frozenset({PLAIN, CHAIN})
    assert {ranks[0].choose(1, 0, allowed) for _ in range(100)} == allowed


def test_the_policy_chooses() -> None:
    asked = []

    class Asked(Recorder):
        def choose(self, b, prefix_tokens, allowed=None, deferred=0, drafting=None):  # type: ignore[no-untyped-def]
            asked.append((b, prefix_tokens, allowed, deferred, drafting))
            return CHAIN

    allowed = frozenset({PLAIN, CHAIN})
    assert ShapeChooser(CAPS, Asked()).choose(3, 70, allowed, deferred=5) == CHAIN
    assert ShapeChooser(CAPS, Asked()).choose(3, 70, drafting=2) == CHAIN
    assert asked == [(3, 70, allowed, 5, 3), (3, 70, None, 0, 2)]


def test_a_round_for_nobody_is_plain() -> None:
    """Where no request has drafts, whatever chooses."""
    for chooser in (ShapeChooser(CAPS, Recorder()), ShapeChooser(CAPS, None), ShapeChooser(CAPS, None, [PLAIN, CAPS])):
        assert {chooser.choose(4, 100, drafting=0) for _ in range(20)} == {PLAIN}


# ---------------------------------------------------------------------------------------------------------------------
# Times


def time_rounds(rounds: list[tuple[Shape, int] | int | None], times: list[float]) -> list[tuple[object, ...]]:
    """What the policy is told of rounds (shape, b) that begin at these times.

    A number stands for a prefill of so many requests, which begins at the next of the times, None for a pause.
    """
    clock = clock_of(*times)
    policy = Recorder()
    chooser = ShapeChooser(CAPS, policy, clock=HostClock(lambda: next(clock)))
    for number, one in enumerate(rounds):
        if one is None:
            chooser.pause()
        elif isinstance(one, int):
            chooser.end_round(one)
        else:
            chooser.begin(*one, prefix_tokens=100 + number)
    return policy.told


def test_a_round_ends_when_the_next_one_begins() -> None:
    told = time_rounds([(CHAIN, 2)] * 4, [1.0, 1.5, 2.25, 4.25])
    assert told == [("time", CHAIN, 2, 101, 0.75), ("time", CHAIN, 2, 102, 2.0)]


def test_the_first_round_of_a_shape_or_of_a_size_class_is_not_timed() -> None:
    """In it the head may read what it has not read before; the sizes 2 and 4 are of two classes."""
    told = time_rounds([(CHAIN, 2), (CAPS, 2), (CAPS, 2), (CAPS, 4), (CAPS, 4), (CHAIN, 4)], [*range(6)])
    assert told == [("time", CAPS, 2, 102, 1), ("time", CAPS, 4, 104, 1)]


def test_requests_that_come_and_go_leave_a_round_its_time() -> None:
    """30 to 33 requests are of one size class."""
    told = time_rounds([(CAPS, b) for b in (32, 30, 31, 33, 32)], [0.0, 1.0, 3.0, 6.0, 10.0])
    assert told == [("time", CAPS, 30, 101, 2.0), ("time", CAPS, 31, 102, 3.0), ("time", CAPS, 33, 103, 4.0)]


def test_a_prefill_ends_a_round_and_is_no_part_of_it() -> None:
    told = time_rounds([(CAPS, 2), (CAPS, 2), 1, (CAPS, 2), (CAPS, 2)], [0.0, 1.0, 1.5, 9.0, 10.0])
    assert told == [("time", CAPS, 2, 101, 0.5), ("time", CAPS, 2, 103, 1.0)]


def test_a_round_after_which_all_requests_are_new_ones_has_no_time() -> None:
    """There may have been nothing to do before they came."""
    told = time_rounds([(CAPS, 2), (CAPS, 2), 1, 1, (CAPS, 2), (CAPS, 2)], [0.0, 1.0, 500.0, 509.0, 510.0])
    assert told == [("time", CAPS, 2, 104, 1.0)]


def test_a_pause_is_no_round() -> None:
    told = time_rounds([(CHAIN, 2), (CHAIN, 2), None, (CHAIN, 2), (CHAIN, 2), (CHAIN, 2)], [0.0, 1.0, 50.0, 51.0, 52.0])
    assert told == [("time", CHAIN, 2, 103, 1.0), ("time", CHAIN, 2, 104, 1.0)]


@pytest.mark.parametrize("jump", [-3600.0, 0.0, math.nan, 1e9])
def test_a_clock_that_jumps_leaves_the_predictions(jump: float) -> None:
    """Backwards, not at all, to no number, or far ahead; the next rounds are timed as ever."""
    policy = Policy(CAPS, CostModel(device(64)))
    now = 0.0
    chooser = ShapeChooser(CAPS, policy, clock=HostClock(lambda: now))
    for number in range(400):
        now += jump if number == 300 else policy.costs.costs.round(CAPS, 2, 0)
        now = 0.0 if math.isnan(now) and number > 300 else now
        chooser.begin(CAPS, 2, 0)
    before = policy.costs.costs.round(CAPS, 2, 0)
    assert policy.costs.seconds([CAPS], 2, 0)[CAPS] == pytest.approx(before, rel=0.01)


def test_errors_are_of_the_predictions_before_the_steps() -> None:
    """Every step corrects the table: a prediction made after it would be nearer to what was measured."""
    now, took, errors_after = 0.0, 1.3 * device(64).round(CAPS, 2, 0), []
    policy = Policy(CAPS, CostModel(device(64)))
    chooser = ShapeChooser(CAPS, policy, clock=HostClock(lambda: now))
    chooser.begin(CAPS, 2, 0)
    for _ in range(3):
        chooser.begin(CAPS, 2, 0)
        expected = policy.costs.seconds([CAPS], 2, 0)[CAPS]
        counted, phases = list(chooser.errors), dict(chooser.phases)
        now += took
        chooser.begin(CAPS, 2, 0)
        counted[class_of(took, expected)] += 1
        assert chooser.errors == counted
        assert sum(chooser.phases.values()) - sum(phases.values()) == pytest.approx(expected)
        errors_after.append(class_of(took, policy.costs.seconds([CAPS], 2, 0)[CAPS]))
        chooser.pause()
        chooser.begin(CAPS, 2, 0)
    # The control: counted after the correction, all three would be in lower classes.
    assert sum(errors_after) < sum(place * n for place, n in enumerate(chooser.errors))
    assert sum(chooser.errors) == 3 and chooser.report().errors == tuple(chooser.errors)


def test_a_report_reads_no_more_after_more_sizes_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made between two rounds; the phases of all steps are sums by then."""
    now, expected, read = 0.0, 0.0, []
    policy = Policy(CAPS, CostModel(device(64)))
    chooser = ShapeChooser(CAPS, policy, clock=HostClock(lambda: now))
    for b in range(1, 200):
        for number in range(2):  # the second is timed, the first too but for the smallest b of a size class
            chooser.begin(CAPS, b, 10 * b)
            if (number and b < 199) or (not number and size_class(b) == size_class(b - 1)):  # the last has not ended
                expected += policy.costs.seconds([CAPS], b, 10 * b)[CAPS]
            now += policy.costs.costs.round(CAPS, b, 10 * b)
    for name in ("phases", "correction", "tabled"):
        healthy = getattr(policy.costs, name)
        monkeypatch.setattr(
            policy.costs, name, lambda shape, b, *rest, healthy=healthy: read.append(b) or healthy(shape, b, *rest)
        )
    chooser.choose(1, 10)
    read.clear()
    report = chooser.report()
    assert sum(report.phases.values()) == pytest.approx(expected)
    assert len(read) == len(policy.shapes) and set(read) == {1}


# ---------------------------------------------------------------------------------------------------------------------
# Results


def test_what_was_accepted_by_depth() -> None:
    policy = Recorder()
    chooser = ShapeChooser(CAPS, policy)
    served = chooser.launched(CAPS, 4, 100, drafts_of(CAPS, 4)._replace(scores=None))
    chooser.observe(served, [0, 3, 1, 2])
    assert policy.told == [("accepted", CAPS, 4, [3, 2, 1])]


def test_requests_that_ended_meanwhile_do_not_count() -> None:
    policy = Recorder()
    chooser = ShapeChooser(CAPS, policy)
    served = chooser.launched(CAPS, 4, 100, drafts_of(CAPS, 4)._replace(scores=None))
    chooser.observe(served, [1, 0])
    chooser.observe(served, [])
    assert policy.told == [("accepted", CAPS, 2, [1, 0, 0])]


def test_requests_without_drafts_teach_nothing() -> None:
    """The policy hears of the others alone; what was served counts all."""
    policy = Recorder()
    chooser = ShapeChooser(CAPS, policy)
    drafts = drafts_of(CAPS, 4)
    served = chooser.launched(CAPS, 4, 100, drafts, drafting=[1, 3])
    chooser.observe(served, [0, 3, 0, 1], [3, 1])
    assert drafts.scores is not None
    sums = PathSums(CAPS, policy.shapes, "cpu")
    wanted = sums.by_shape(sums(drafts.scores[[1, 3]]))
    assert policy.told == [("sums", CAPS, 2, wanted), ("accepted", CAPS, 2, [2, 1, 1])]
    assert chooser.totals[CAPS].rounds == 4 and chooser.totals[CAPS].tokens == 8
    policy.told.clear()
    chooser.observe(chooser.launched(CAPS, 4, 100, drafts, drafting=[]), [0, 0, 0, 0], [])
    assert policy.told == [] and chooser.totals[CAPS].rounds == 8


def test_plain_rounds_tell_nothing_of_drafts() -> None:
    policy = Recorder()
    chooser = ShapeChooser(CAPS, policy)
    chooser.observe(chooser.launched(PLAIN, 2, 100, Drafts.plain(torch.zeros(2))), [0, 0])
    assert policy.told == []


def test_sums_of_the_drafted_trees() -> None:
    policy = Recorder()
    chooser = ShapeChooser(CAPS, policy)
    drafts = drafts_of(CAPS, 3)
    chooser.observe(chooser.launched(CAPS, 3, 100, drafts), [0, 1, 2])
    sums = PathSums(CAPS, policy.shapes, "cpu")
    assert drafts.scores is not None
    assert policy.told[0] == ("sums", CAPS, 3, sums.by_shape(sums(drafts.scores)))
    assert [kind for kind, *_ in policy.told] == ["sums", "accepted"]


def test_every_fourth_round_tells_its_sums_and_every_first_one_of_a_shape() -> None:
    """A probe is a single round of another shape: it must tell all that it can."""
    policy = Recorder()
    chooser = ShapeChooser(CAPS, policy)
    rounds = [CAPS] * 9 + [CHAIN] + [CAPS] * 2 + [PLAIN] + [CAPS] * 2
    has_sums = []
    for shape in rounds:
        drafts = Drafts.plain(torch.zeros(2)) if shape == PLAIN else drafts_of(shape, 2)
        served = chooser.launched(shape, 2, 100, drafts)
        chooser.observe(served, [0, 1])
        has_sums.append(served.sums is not None)
    assert SUM_ROUNDS == 4
    first = [True, False, False, False]
    assert has_sums == [*first, *first, True, True, True, False, False, True, False]
    assert [kind for kind, *_ in policy.told].count("sums") == has_sums.count(True)


def test_results_may_come_rounds_later() -> None:
    policy = Recorder()
    chooser = ShapeChooser(CAPS, policy)
    served = [chooser.launched(shape, 2, 100, drafts_of(shape, 2)) for shape in (CAPS, CHAIN)]
    for one, kept in zip(served, ([1, 1], [2, 0]), strict=True):
        chooser.observe(one, kept)
    assert [told[:3] for told in policy.told if told[0] == "accepted"] == [
        ("accepted", CAPS, 2),
        ("accepted", CHAIN, 2),
    ]


def test_without_a_policy_nothing_is_noted() -> None:
    chooser = ShapeChooser(CAPS, None)
    served = chooser.launched(CAPS, 2, 100, drafts_of(CAPS, 2))
    assert served.sums is None
    chooser.begin(CAPS, 2, 100)
    chooser.begin(CAPS, 2, 100)
    chooser.begin(CAPS, 2, 100)
    chooser.observe(served, [1, 2])


def test_path_sums_are_copied_before_their_memory_is_used_again() -> None:
    policy = Recorder()
    chooser = ShapeChooser(CAPS, policy, buffers=buffers_of(policy, 8, "cpu"))
    drafts, kept = drafts_of(CAPS, 3), []

    def captured(sums: PathSums, scores: torch.Tensor) -> torch.Tensor:
        """Of one request more than there are, as of a padded batch."""
        kept.append(torch.cat([sums(scores), torch.full((len(sums.shapes), 1, CAPS.steps), math.nan)], dim=1))
        return kept[0]

    served = chooser.launched(CAPS, 3, 100, drafts, captured)
    kept[0].fill_(math.nan)
    chooser.observe(served, [0, 1, 2])
    sums = PathSums(CAPS, policy.shapes, "cpu")
    assert drafts.scores is not None
    assert policy.told[0] == ("sums", CAPS, 3, sums.by_shape(sums(drafts.scores)))


def test_path_sums_that_were_made_for_captures_are_used() -> None:
    """To make them takes copies from the host, for which a served round would wait."""
    policy = Recorder()
    made = {CAPS: PathSums(CAPS, policy.shapes, "cpu")}
    chooser = ShapeChooser(CAPS, policy, path_sums=made)
    assert chooser.launched(CAPS, 3, 100, drafts_of(CAPS, 3)).path_sums is made[CAPS]
    assert chooser.launched(CHAIN, 3, 100, drafts_of(CHAIN, 3)).path_sums is not None  # one that was not captured
    assert list(made) == [CAPS]
