"""Chooses the shape of the trees of a batch, plain decoding included."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.costs import CostModel, rate, size_class
from eagle_plugin.policy.shapes import deepest_of, shapes_within
from eagle_plugin.policy.survival import Survival

# Where a value is from: a test of tests/policy whose world it passes, a derivation, or an assumption.
HYSTERESIS = 0.03  # a change must promise so much more: less is noise (test_noise_does_not_make_it_flip)
CATCH_UP_ROUNDS = 64  # assumed; of plain decoding: in their time, drafting must earn what the head reads first
REVIEW_ROUNDS = 8  # assumed; rounds between two choices for batches of one size
CHANGED_BATCH = 1.25  # a batch that grew or shrank by so much is reviewed at once: less than a size class, which is 2
PROBE_COST = 0.01  # of the time may be lost to shapes that are tried only to learn: what is wanted
PROBE_ROUNDS = 32  # rounds between two of them at least (test_a_probe_that_pays_brings_the_next_one_forward)
MOST_SPARE = 4.0  # assumed; rounds' time that probes may have earned for the next ones, or owe
PROMPT_MEMORY = 4096  # output tokens of the mean of prompt tokens (test_prompts_are_averaged_over_many_answers)
PRIOR_TOKENS = 512.0  # of them without a prompt at the start (the same test: one long prompt is no load of them)
COMPARE_ROUNDS = 4  # of a shape that is served to be timed: three have times, the first one after a change has none
COMPARED_FOR = 64  # rounds in which the better one of two shapes is served (test_wrong_tables_cost_little_...)
COMPARE_COST = 0.01  # of the time may be lost to these, in batches of one size class: what is wanted
LEAST_LOSS = COMPARE_COST  # of the time of rounds that compare: they cost something, whatever is expected
PLAIN_EVERY = 512  # assumed; rounds between two comparisons of plain decoding with drafts at least, of one size class
PLAIN_COST = 0.003  # of the time may be lost to these: what is wanted


def gain_of_knowing(better: float, doubt: float) -> float:
    """What knowing by how much a shape is better than another one gains, where it is expected to be `better`.

    All in logarithms; doubt: the standard deviation. It is the knowledge gradient of P. Frazier, W. Powell and S.
    Dayanik (2008) for a measurement that tells all: the expected maximum of the difference and 0, less what the shape
    gives that now seems better.
    """
    if doubt <= 0:
        return 0.0
    z = abs(better) / doubt
    return doubt * (math.exp(-z * z / 2) / math.sqrt(2 * math.pi) - z * math.erfc(z / math.sqrt(2)) / 2)


class Policy:
    """Chooses the shape of every round: the most expected tokens per second.

    It reads numbers of earlier rounds only, all of them on the host, so a choice never waits for a device; the same
    numbers give the same choices in every rank. While it does not draft all that the caps allow, it tries a shape now
    and then that tells what the present one does not: a probe. While it drafts, some rounds are plain, and some have
    another shape, so that their costs are measured at the same speed of the machine as that of the present one; while
    it does not, some rounds in a row draft, for the same.
    """

    def __init__(self, caps: Shape, costs: CostModel, shapes: Sequence[Shape] | None = None) -> None:
        """shapes: those that may be chosen, plain decoding and the caps among them."""
        self.caps, self.costs = caps, costs
        self.shapes = tuple(shapes or shapes_within(caps))
        self.survival = Survival(self.shapes)
        self._deepest = deepest_of(self.shapes)
        self.present = caps  # until something is known of drafts: the first path sums are those of all shapes
        self._is_measured = False
        self._asked: tuple[int, int, Collection[Shape] | None] = 0, 0, None
        self._since_review = 0
        self._rounds: dict[int, int] = {}  # by size class of the batch, up to the last review
        # By size class, and by whether they draft: after how many rounds such ones were served to be timed.
        self._timed_until: dict[tuple[int, bool], int] = {}
        self._compares_from: dict[int, float] = {}  # by size class: after how many rounds others may be again
        self._compared: Shape | None = None  # served for some rounds after a review
        self._probe = caps
        self._lost = 0.0  # what a probe costs, in rounds of the present shape
        self._spare = 0.0  # what may be lost to probes, in the same unit
        self._prompt_tokens, self._output_tokens = 0.0, PRIOR_TOKENS  # of the last some PROMPT_MEMORY output tokens

    def choose(
        self,
        b: int,
        prefix_tokens: int,
        allowed: Collection[Shape] | None = None,
        deferred: int = 0,
        drafting: int | None = None,
    ) -> Shape:
        """The shape of the next round of b requests; prefix_tokens: of all of them together.

        allowed: the shapes that this batch can have, if not all; plain decoding is one of them. deferred: tokens of
        plain rounds per request that the head has to read before it drafts; a probe pays for that, and a change from
        plain decoding must promise so much more. drafting: requests that have drafts, if not all; at least 1.
        """
        drafting = b if drafting is None else drafting
        is_due = self.is_due(b, allowed, drafting)
        self._since_review += 1
        if is_due:
            self._review(b, prefix_tokens, allowed, deferred, drafting)
            self._asked, self._since_review = (b, drafting, allowed), 1
        if self._compared is not None and self._since_review <= COMPARE_ROUNDS:
            return self._compared
        if self._probe == self.present:
            return self.present
        self._spare += PROBE_COST
        if self._spare < self._lost:
            return self.present
        lost = self._lost
        if deferred:
            lost += self._catch_up(b, prefix_tokens, deferred)
        if self._spare < lost:
            return self.present
        self._spare -= lost
        return self._probe

    def is_due(self, b: int, allowed: Collection[Shape] | None = None, drafting: int | None = None) -> bool:
        """Whether the next choice looks at all shapes again; else it reads nothing of what was learned."""
        return self._since_review >= REVIEW_ROUNDS or self._is_other_batch(
            b, b if drafting is None else drafting, allowed
        )

    def rates(
        self, b: int, prefix_tokens: int, allowed: Collection[Shape] | None = None, drafting: int | None = None
    ) -> dict[Shape, float]:
        """Expected tokens per second of the batch, by shape; allowed: of these only; drafting as of `choose`.

        A request without drafts yields one token per round, and costs as much as one with drafts.
        """
        drafting = b if drafting is None else drafting
        shapes = self.shapes if allowed is None else [shape for shape in self.shapes if shape in allowed]
        expected = self.survival.expected()
        seconds = self.costs.seconds(shapes, b, prefix_tokens)
        reading = self.reading()
        return {shape: rate(shape, b + drafting * expected[shape], time, reading) for shape, time in seconds.items()}

    def reading(self) -> float:
        """Seconds per output token in which the head reads prompts, where it reads them only in order to draft."""
        return self.costs.prompt_token() * self._prompt_tokens / self._output_tokens

    def observe_tokens(self, prompt: int, output: int) -> None:
        """Learn from a step how many prompt tokens are read per output token, whether the head reads them or not."""
        kept = math.exp(-output / PROMPT_MEMORY)
        self._prompt_tokens = self._prompt_tokens * kept + prompt
        self._output_tokens = self._output_tokens * kept + output

    def observe_sums(self, shape: Shape, b: int, sums: Mapping[Shape, Sequence[float]]) -> None:
        """As `Survival.observe_sums`."""
        self._is_measured = True
        self.survival.observe_sums(shape, b, sums)

    def observe_accepted(self, shape: Shape, b: int, reached: Sequence[int]) -> None:
        """As `Survival.observe_accepted`. A probe that yields more than was expected pays for the next ones."""
        self._is_measured = True  # where some prompt is always being read there are no sums
        if shape != self.present:
            expected = self.survival.expected()
            more = (sum(reached) / b - expected[shape]) / (1 + expected[self.present])
            self._spare = max(-MOST_SPARE, min(self._spare + more, MOST_SPARE))
        self.survival.observe_accepted(shape, b, reached)

    def observe_time(self, shape: Shape, b: int, prefix_tokens: int, seconds: float) -> None:
        """As `CostModel.observe`."""
        self.costs.observe(shape, b, prefix_tokens, seconds)

    def _is_other_batch(self, b: int, drafting: int, allowed: Collection[Shape] | None) -> bool:
        *last, allowed_last = self._asked
        sizes = zip((b, drafting), last, strict=True)
        return allowed != allowed_last or any(not old / CHANGED_BATCH < n < old * CHANGED_BATCH for n, old in sizes)

    def _review(
        self, b: int, prefix_tokens: int, allowed: Collection[Shape] | None, deferred: int, drafting: int
    ) -> None:
        rates = self.rates(b, prefix_tokens, allowed, drafting)
        best = max(rates, key=rates.__getitem__)
        if not self._is_measured and self.caps in rates:
            self.present = best = self.caps
        promised = rates[best]
        if self.present == PLAIN and deferred:
            span = CATCH_UP_ROUNDS * self.costs.seconds((PLAIN,), b, prefix_tokens)[PLAIN]
            promised *= span / (span + self.costs.catch_up(b, prefix_tokens, deferred))
        if self.present not in rates or promised > rates[self.present] * (1 + HYSTERESIS):
            self.present = best
        self._compared = self._to_compare(b, prefix_tokens, rates, deferred)
        self._probe = self._most_telling(rates)
        if self._probe != self.present:
            lost = self._lost_by(self._probe, b, prefix_tokens, rates)
            self._lost = max(lost, PROBE_ROUNDS * PROBE_COST)

    def _lost_by(self, shape: Shape, b: int, prefix_tokens: int, rates: Mapping[Shape, float]) -> float:
        """What a round of a shape costs, in rounds of the present one: it takes `longer`, and yields the tokens of so
        many rounds times the ratio of their rates."""
        seconds = self.costs.seconds((shape, self.present), b, prefix_tokens)
        longer = seconds[shape] / seconds[self.present]
        return longer * (1 - rates[shape] / rates[self.present])

    def _catch_up(self, b: int, prefix_tokens: int, deferred: int) -> float:
        """The same of what the head has to read before it drafts."""
        if not deferred:
            return 0.0
        seconds = self.costs.seconds((self.present,), b, prefix_tokens)[self.present]
        return self.costs.catch_up(b, prefix_tokens, deferred) / seconds

    def _to_compare(self, b: int, prefix_tokens: int, rates: Mapping[Shape, float], deferred: int) -> Shape | None:
        """Plain decoding now and then, whatever is expected of it, else the shape most worth measuring, if any is.

        Where rounds are plain, now and then the best that drafts: a probe is one round alone, which has no time. Only
        rounds of batches of this size class count: a load that changes all the time compares as seldom.
        """
        if self._asked[0]:
            last_size = size_class(self._asked[0])
            self._rounds[last_size] = self._rounds.get(last_size, 0) + self._since_review - 1
        size, present = size_class(b), self.present
        rounds = self._rounds.get(size, 0)
        self._timed_until[size, present != PLAIN] = rounds
        other = self._most_telling(rates) if present == PLAIN else PLAIN
        if other == present or not self.costs.knows_speed(b):
            return None
        lost = COMPARE_ROUNDS * (1 - rates[other] / rates[present])
        if present == PLAIN:
            lost = COMPARE_ROUNDS * max(self._lost_by(other, b, prefix_tokens, rates), LEAST_LOSS)
            lost += self._catch_up(b, prefix_tokens, deferred)
        last = self._timed_until.get((size, present == PLAIN), -math.inf)
        if rounds >= last + max(PLAIN_EVERY, lost / PLAIN_COST):
            self._timed_until[size, present == PLAIN] = rounds
            if present == PLAIN:
                self._spare -= lost  # these rounds tell what probes do
            return other
        if present == PLAIN:
            return None
        if rounds < self._compares_from.get(size, 0):
            return None
        best, most = None, 0.0
        for shape, promised in rates.items():
            if shape == present:
                continue
            better = math.log(promised / rates[present])
            lost = COMPARE_ROUNDS * max(1 - math.exp(better), LEAST_LOSS)
            gained = COMPARED_FOR * gain_of_knowing(better, self.costs.doubt(b, shape, present)) - lost
            if gained > most:
                best, most = shape, gained
                self._compares_from[size] = rounds + lost / COMPARE_COST
        return best

    def _most_telling(self, rates: Mapping[Shape, float]) -> Shape:
        """The shape that tells most of what rounds of the present one do not, and costs least.

        Plain rounds tell nothing of the drafts; shallow trees nothing of deeper levels, chains nothing of siblings.
        """
        if self.present == PLAIN:
            return max((shape for shape in rates if shape != PLAIN), key=rates.__getitem__, default=PLAIN)
        deepest = self._deepest if self.caps in rates else deepest_of(rates)
        return self.present if self.present in deepest else max(deepest, key=rates.__getitem__)
