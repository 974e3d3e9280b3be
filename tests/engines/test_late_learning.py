"""What the shape chooser of an engine that learns late tells the policy: the same, before the policy reviews."""

from __future__ import annotations

import torch
from policy_recorder import CAPS, CHAIN, Recorder, drafts_of
from policy_world import device

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.chooser import MOST_UNLEARNED, ShapeChooser, buffers_of
from eagle_plugin.policy.costs import CostModel
from eagle_plugin.policy.policy import REVIEW_ROUNDS, Policy
from eagle_plugin.policy.report import ShapeTotals
from eagle_plugin.policy.round_times import HostClock
from eagle_plugin.runtime.round import Drafts


def serve(chooser: ShapeChooser, now: list[float], shapes: list[Shape]) -> None:
    """Rounds of these shapes that are not asked for, and what they tell."""
    for number, shape in enumerate(shapes):
        b = 2 + number // 40
        chooser.begin(shape, b, 100 + number)
        now[0] += device(64).round(shape, b, 0) * (1.1 + 0.02 * (number % 5))
        drafts = Drafts.plain(torch.zeros(b)) if shape == PLAIN else drafts_of(shape, b)
        kept = [(number + i) % (shape.steps + 1) for i in range(b)]
        chooser.observe(chooser.launched(shape, b, 100 + number, drafts), kept)


def test_what_is_learned_late_is_the_same() -> None:
    rounds = ([CAPS] * 7 + [CHAIN] * 5 + [PLAIN] * 3 + [CAPS] * 2) * 6
    reports = []
    for late in (False, True):
        now, policy = [0.0], Policy(CAPS, CostModel(device(64)))
        buffers = buffers_of(policy, 8, "cpu") if late else None
        chooser = ShapeChooser(CAPS, policy, clock=HostClock(lambda now=now: now[0]), buffers=buffers, learns_late=late)  # type: ignore[misc]
        chooser.choose(2, 100)
        serve(chooser, now, rounds)
        chooser.choose(20, 100)  # of another batch: the policy reviews, and has learned all before
        reports.append((chooser.report(), policy.survival.expected(), policy.costs.seconds(policy.shapes, 2, 100)))
    assert reports[0] == reports[1] and sum(reports[0][0].errors) > 30


def test_late_rounds_are_learned_before_the_policy_reviews() -> None:
    policy = Recorder()
    chooser = ShapeChooser(CAPS, policy, learns_late=True)
    known = []
    for _ in range(3 * REVIEW_ROUNDS):
        chooser.choose(2, 100)
        known.append(len(policy.told))
        chooser.observe(chooser.launched(CAPS, 2, 100, drafts_of(CAPS, 2)._replace(scores=None)), [1, 2])
    assert sorted(set(known)) == [0, REVIEW_ROUNDS, 2 * REVIEW_ROUNDS]


def test_what_is_read_teaches_nothing() -> None:
    """Metrics are read in one of several ranks, which must choose as the others do; all that was served is in them."""
    policy = Recorder()
    chooser = ShapeChooser(CAPS, policy, learns_late=True)
    chooser.choose(2, 100)
    for number in range(1, REVIEW_ROUNDS):
        chooser.observe(chooser.launched(CAPS, 2, 100, drafts_of(CAPS, 2)._replace(scores=None)), [1, 2])
        assert chooser.report().totals == chooser.totals == {CAPS: ShapeTotals(2 * number, 5 * number, number, 0, 0, 0)}
        assert not policy.told
    chooser.choose(20, 100)
    assert len(policy.told) == REVIEW_ROUNDS - 1 and chooser.totals[CAPS].rounds == 2 * (REVIEW_ROUNDS - 1)


def test_rounds_that_ask_for_no_choice_are_learned_too() -> None:
    policy = Recorder()
    chooser = ShapeChooser(CAPS, policy, learns_late=True)
    for _ in range(1000):
        chooser.observe(chooser.launched(CAPS, 2, 100, drafts_of(CAPS, 2)._replace(scores=None)), [1, 2])
    assert len(policy.told) > 1000 - MOST_UNLEARNED
