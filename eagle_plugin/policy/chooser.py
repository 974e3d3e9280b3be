"""Chooses the shape of the next round in both engines, and tells the policy what served rounds took and yielded."""

from __future__ import annotations

import math
import os
import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.costs import PHASES, size_class
from eagle_plugin.policy.host_buffers import HostBuffers
from eagle_plugin.policy.path_sums import PathSums
from eagle_plugin.policy.policy import REVIEW_ROUNDS, Policy
from eagle_plugin.policy.prediction_errors import CLASSES, class_of
from eagle_plugin.policy.report import Expected, PolicyReport, ShapeTotals
from eagle_plugin.policy.round_times import Clock, HostClock, RoundTimes
from eagle_plugin.policy.served_rounds import Result, Scored, ServedRound, TimedRound, add_to, yields_of
from eagle_plugin.policy.survival import Survival, reached_depths

SUM_ROUNDS = 4  # of so many rounds of one shape the first tells its path sums
MOST_UNLEARNED = 4 * REVIEW_ROUNDS  # times and results: rounds that ask for no choice are learned as well
MODES = ("auto", "fixed", "random")

SumUp = Callable[[PathSums, Tensor], Tensor]
Share = Callable[[Sequence[TimedRound]], Sequence[TimedRound]]


class PolicyModeError(UserError):
    """``EAGLE_POLICY`` has a value that is not known; the message says which are."""


def policy_mode() -> str:
    """How shapes are chosen, by ``EAGLE_POLICY``.

    auto: by the policy. fixed: the caps in every round. random: any shape within the caps, to test that shapes change
    no output. Raises PolicyModeError.
    """
    mode = os.environ.get("EAGLE_POLICY", "") or MODES[0]
    if mode not in MODES:
        raise PolicyModeError(f"EAGLE_POLICY is {mode!r}, wanted one of {', '.join(MODES)}: set it to one, or unset it")
    return mode


class ShapeChooser:
    """Chooses the shapes of a server's rounds.

    All calls are made by one thread: `choose` and `launched` for every round in turn, `observe` for each round in the
    same order, later. Nothing waits for a device.
    """

    looked_up: Callable[[], tuple[int, int]] | None = None  # as in `PolicyReport`, where branches are looked up

    def __init__(
        self,
        caps: Shape,
        policy: Policy | None,
        shapes: Sequence[Shape] = (),
        clock: Clock | None = HostClock(),  # noqa: B008 - it has no state
        buffers: HostBuffers | None = None,
        learns_late: bool = False,
        share: Share | None = None,
        path_sums: Mapping[Shape, PathSums] | None = None,
    ) -> None:
        """policy: None for fixed shapes, or for random ones where `shapes` has those to choose from.

        clock: None where nothing is timed. Several ranks that must choose alike would measure other times: then one
        has a clock, and share gives its times to all; it is called by all ranks, before the policy looks at all shapes
        again. buffers: where path sums are copied to (`buffers_of`); None on a CPU where nothing is captured.
        learns_late: what rounds tell is kept until the policy looks at all shapes again, and is learned together then,
        which takes less of the host; needed with share. path_sums: by drafted shape, those that are there already.
        """
        assert share is None or learns_late
        self.caps, self.policy = caps, policy
        self._random = random.Random(2026)  # the same in every rank
        self._shapes = shapes
        self._buffers = buffers
        self._round_times = None if clock is None or policy is None else RoundTimes[ServedRound](clock)
        self._arrived = 0  # requests of the prefills since the last decode round
        self._path_sums: dict[Shape, PathSums] = dict(path_sums or {})
        self._drafted_shape, self._drafted = PLAIN, 0  # of the round before, and rounds since the shape changed
        self._load = 0, 0, 0  # requests, tokens of their prefixes, and requests with drafts, of the latest choice
        self._learns_late, self._share = learns_late, share
        self._times: deque[TimedRound] = deque(maxlen=MOST_UNLEARNED)  # not learned yet
        self._results: list[Result] = []  # the same
        self._totals: dict[Shape, list[float]] = {}  # as `ShapeTotals`
        self._phases = dict.fromkeys(PHASES, 0.0)  # of the predicted seconds of the timed steps
        self.errors = [0] * CLASSES  # the timed steps by the error of their prediction

    @property
    def shapes(self) -> Sequence[Shape]:
        """The shapes that it chooses from."""
        return self.policy.shapes if self.policy is not None else self._shapes or (self.caps,)

    def choose(
        self,
        b: int,
        prefix_tokens: int,
        allowed: Collection[Shape] | None = None,
        deferred: int = 0,
        drafting: int | None = None,
    ) -> Shape:
        """The shape of the next round; as `Policy.choose`, but drafting may be 0: such a round is plain."""
        drafting = b if drafting is None else drafting
        self._load = b, prefix_tokens, drafting
        if not drafting:
            return PLAIN
        if self.policy is not None:
            if self._learns_late and self.policy.is_due(b, allowed, drafting):
                self._learn(reviews=True)
            return self.policy.choose(b, prefix_tokens, allowed, deferred, drafting)
        if self._shapes:
            return self._random.choice([x for x in self._shapes if allowed is None or x in allowed])
        return self.caps if allowed is None or self.caps in allowed else PLAIN

    def launched(
        self,
        shape: Shape,
        b: int,
        prefix_tokens: int,
        drafts: Scored,
        sum_up: SumUp = PathSums.__call__,
        drafting: Sequence[int] | None = None,
    ) -> ServedRound:
        """Note a round whose drafts, of b requests, were launched.

        sum_up: launches path sums over scores; it may replay what was captured, of b or more requests. drafting: places
        of the requests that have drafts, None: all; of the others nothing is learned.
        """
        if self.policy is None or drafts.scores is None or (drafting is not None and not drafting):
            self._drafted_shape = shape
            return ServedRound(shape, b, prefix_tokens, drafting=drafting)
        self._drafted = self._drafted + 1 if shape == self._drafted_shape else 0
        self._drafted_shape = shape
        if self._drafted % SUM_ROUNDS:
            return ServedRound(shape, b, prefix_tokens, drafting=drafting)
        path_sums = self._sums_of(shape, drafts.scores)
        sums = sum_up(path_sums, drafts.scores)
        sums = sums if self._buffers is None else self._buffers.copy(sums)
        return ServedRound(shape, b, prefix_tokens, sums[:, :b], path_sums, drafting)

    def begin(self, shape: Shape, b: int, prefix_tokens: int) -> None:
        """Note when a decode round begins: it ends when the next one begins, or at `end_round`.

        The first round of a shape, or of a batch of another size class, is not timed: the head may read in it what it
        has not read in plain rounds.
        """
        if self._round_times is None:
            return
        if b <= self._arrived:  # all requests are new ones: there may have been nothing to do before they came
            self.pause()
        self._arrived = 0
        before = self._round_times.newest
        is_alike = before is not None and before.shape == shape and size_class(before.b) == size_class(b)
        if timed := self._round_times.begin(ServedRound(shape, b, prefix_tokens), is_alike):
            self._times.extend(timed)
            self._has_seen_more()

    def end_round(self, arrived: int = 0) -> None:
        """The round ends now: what is before the next one, as a prefill of so many new requests, is no part of it."""
        self._arrived += arrived
        if self._round_times is not None:
            self._round_times.end()

    def pause(self) -> None:
        """What comes before the next round is not a decode round's time: a step with prompts, or nothing to do."""
        if self._round_times is not None:
            self._round_times.drop()

    def observe(self, served: ServedRound, kept: Sequence[int], drafted: Sequence[int] | None = None) -> None:
        """Learn from a round's results; kept has the accepted draft tokens of each request, on the host.

        drafted: those of the requests that had drafts, None: all.
        """
        if not kept:
            return
        sums = None
        if served.sums is not None and served.path_sums is not None:
            # Now: the buffer has others some rounds later.
            sums = served.path_sums.by_shape(served.sums, served.drafting)
        self._results.append(Result(served, sums, kept, kept if drafted is None else drafted))
        self._has_seen_more()

    def observe_tokens(self, prompt: int, output: int) -> None:
        """As `Policy.observe_tokens`."""
        if self.policy is not None:
            self.policy.observe_tokens(prompt, output)

    def forget_head(self) -> None:
        """Another head serves: what was learned of the drafts of the one before it says nothing of this one."""
        if self.policy is not None:
            self._learn()
            self.policy.survival = Survival(self.policy.shapes)

    @property
    def totals(self) -> Mapping[Shape, ShapeTotals]:
        """What the rounds of each shape yielded so far; to be read by the thread that makes the other calls.

        Reading it teaches the policy nothing: it may be read in one rank only, and all ranks must choose alike. Times
        that are not learned yet are therefore not counted: what was expected of them depends on the ones before.
        """
        totals = {shape: list(found) for shape, found in self._totals.items()}
        for result in self._results:
            add_to(totals, result.served.shape, yields_of(result))
        return {shape: ShapeTotals._make(found) for shape, found in totals.items()}

    @property
    def phases(self) -> dict[str, float]:
        """The phases of the predicted seconds of the timed steps."""
        return dict(self._phases)

    def report(self) -> PolicyReport:
        """What the policy has seen and expects now; it takes some 100 microseconds of the thread of the other calls."""
        totals, (b, prefix_tokens, drafting), policy = self.totals, self._load, self.policy
        looked_up = () if self.looked_up is None else self.looked_up()
        if policy is None:
            mode = "random" if self._shapes else "fixed"
            return PolicyReport(mode, self.caps, self.caps, b, prefix_tokens, totals=totals, looked_up=looked_up)
        expected: dict[Shape, Expected] = {}
        if b:
            seconds, accepted = policy.costs.seconds(policy.shapes, b, prefix_tokens), policy.survival.expected()
            share = drafting / b
            expected = {shape: Expected(seconds[shape], 1 + share * accepted[shape]) for shape in policy.shapes}
        return PolicyReport(
            mode="auto",
            caps=self.caps,
            present=policy.present,
            requests=b,
            prefix_tokens=prefix_tokens,
            slowdown=math.exp(policy.costs.speed),
            factors=tuple(policy.survival.factors()),
            totals=totals,
            expected=expected,
            reading=policy.reading(),
            phases=self.phases,
            errors=tuple(self.errors),
            looked_up=looked_up,
        )

    def _has_seen_more(self) -> None:
        """Learn what rounds told, now or later; they may be no more than the policy looks at in its reviews."""
        own = 0 if self._share is not None else len(self._times)  # what is shared is learned when all ranks review
        if not self._learns_late or own + len(self._results) >= MOST_UNLEARNED:
            self._learn()

    def _learn(self, reviews: bool = False) -> None:
        """Tell the policy what it was not told yet, in the order of the rounds.

        reviews: the policy looks at all shapes next, in all ranks; only then are shared times learned.
        """
        if self._share is None or reviews:
            times = list(self._times)
            self._times.clear()
            for served, seconds in times if self._share is None else self._share(times):
                self._observe_time(served, seconds)
        results, self._results = self._results, []
        for result in results:
            served, sums, _, drafted = result
            shape = served.shape
            add_to(self._totals, shape, yields_of(result))
            if self.policy is None or shape == PLAIN:
                continue
            if sums is not None:
                self.policy.observe_sums(shape, served.b if served.drafting is None else len(served.drafting), sums)
            if drafted:
                self.policy.observe_accepted(shape, len(drafted), reached_depths(drafted, shape.steps))

    def _observe_time(self, served: ServedRound, seconds: float) -> None:
        """Learn how long a step took, and count it with what was expected of it before."""
        assert self.policy is not None
        shape, b, prefix_tokens = served.shape, served.b, served.prefix_tokens
        if seconds > 0:
            costs = self.policy.costs
            correction = costs.correction(shape, b)  # before the step changes it
            predicted = correction * costs.tabled(shape, b, prefix_tokens)
            add_to(self._totals, shape, (0, 0, 0, 1, seconds, predicted))
            self.errors[class_of(seconds, predicted)] += 1
            for name, part in costs.phases(shape, b, prefix_tokens, correction).items():
                self._phases[name] += part
        self.policy.observe_time(shape, b, prefix_tokens, seconds)

    def _sums_of(self, shape: Shape, scores: Tensor) -> PathSums:
        if shape not in self._path_sums:
            assert self.policy is not None
            self._path_sums[shape] = PathSums(shape, self.policy.shapes, scores.device, scores.shape[1])
        return self._path_sums[shape]


def buffers_of(policy: Policy, requests: int, device: torch.device | str) -> HostBuffers:
    """Room for the path sums of all shapes, of so many requests at most."""
    return HostBuffers(len(policy.shapes) * requests * max(shape.steps for shape in policy.shapes), device)
