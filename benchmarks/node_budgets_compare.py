"""Compares ways to give the nodes of a batch to its requests: by accepted tokens, and by tokens per second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.node_budgets_costs import round_seconds
from benchmarks.node_budgets_rounds import MOST_NODES, Ranked, Rounds, allocate, calibrate
from eagle_plugin.core.shape import PLAIN
from eagle_plugin.policy.costs import Costs

LEVELS, CHILDREN = (1, 2, 3, 5, 7), (1, 2, 4)
WIDTHS = (1.25, 1.5, 2, 3, 4, 5, 6, 8, 12, 16)  # mean nodes per request, the root included
SAME = "same"  # every request gets the same number of nodes, the best of its own by path score: as served today
SAME_CALIBRATED = "same, calibrated"  # the same, chosen by calibrated scores
RAW = "by request, raw"  # the best nodes of the whole batch by path score
CALIBRATED = "by request, calibrated"  # the same by calibrated scores
CAPPED = "by request, at most 2 W"  # the same, no request has more than twice the mean
PADDED = "by request, padded"  # the same as CALIBRATED, every request pays for the rows of the largest tree
CAPPED_PADDED = "by request, at most 2 W, padded"
ORACLE = "oracle"  # the best nodes of the batch by what the target will accept
WARM_UP, WALKED = 30, 60  # rounds of `walk`
WAYS = (SAME, SAME_CALIBRATED, RAW, CALIBRATED, CAPPED, PADDED, CAPPED_PADDED, ORACLE)


class Plan(NamedTuple):
    """What a policy chooses: levels, children per node, and mean nodes per request; 0/1/1 is plain decoding."""

    steps: int
    topk: int
    width: float

    def __str__(self) -> str:
        return f"{self.steps}/{self.topk}/{self.width:g}"


class Batches(NamedTuple):
    """What n batches of b requests yield with one plan."""

    accepted: float  # expected drafted tokens per request and round
    rows: np.ndarray  # [n], or 1 if all are alike: rows of the target's forward
    longest: int  # nodes of the largest tree that a request may get


def rank(rounds: Rounds) -> dict[tuple[str, int, int], Ranked]:
    """The candidates by what they are chosen by ("raw", "calibrated", "oracle"), levels and children."""
    known = np.where(rounds.reach > 0, rounds.reach, -np.inf)
    estimates = {"raw": rounds.scores, "calibrated": calibrate(rounds), "oracle": known}
    return {
        (name, steps, topk): Ranked.of(rounds, values, steps, topk)
        for name, values in estimates.items()
        for steps in LEVELS
        for topk in CHILDREN
    }


def compare(
    ranked: dict[tuple[str, int, int], Ranked], picked: np.ndarray, widths: Sequence[float] = WIDTHS
) -> Iterator[tuple[str, Plan, Batches]]:
    """What batches of rounds yield, by way and plan; picked [n, b]: rounds of each batch."""
    b = picked.shape[1]
    for way in WAYS:
        yield way, Plan(*PLAIN), Batches(0.0, np.array([b]), 1)
    for steps in LEVELS:
        for topk in CHILDREN:
            of = {name: ranked[name, steps, topk] for name in ("raw", "calibrated", "oracle")}
            most = topk + (steps - 1) * topk * topk + 1
            plans = [Plan(steps, topk, width) for width in widths if width <= most]
            for plan in plans:
                if plan.width == int(plan.width) and steps < plan.width:
                    nodes = int(plan.width)
                    for way, name in ((SAME, "raw"), (SAME_CALIBRATED, "calibrated")):
                        accepted = float(of[name].accepted[picked, nodes - 1].mean())
                        yield way, plan, Batches(accepted, np.array([b * nodes]), nodes)
            budgets = [round(b * (plan.width - 1)) for plan in plans]
            for way, name in ((RAW, "raw"), (CALIBRATED, "calibrated"), (ORACLE, "oracle")):
                counts = allocate(of[name].estimates[picked], budgets)
                for plan, given in zip(plans, counts, strict=True):
                    yield way, plan, _batches(of[name], picked, given, MOST_NODES)
                    if way == CALIBRATED:
                        yield PADDED, plan, _batches(of[name], picked, given, MOST_NODES, is_padded=True)
            for plan, budget in zip(plans, budgets, strict=True):
                cap = int(np.ceil(2 * plan.width))
                given = allocate(of["calibrated"].estimates[picked][:, :, : cap - 1], [budget])[0]
                yield CAPPED, plan, _batches(of["calibrated"], picked, given, cap)
                yield CAPPED_PADDED, plan, _batches(of["calibrated"], picked, given, cap, is_padded=True)


def _batches(of: Ranked, picked: np.ndarray, given: np.ndarray, cap: int, is_padded: bool = False) -> Batches:
    b = picked.shape[1]
    rows = b * (1 + given.max(1)) if is_padded else b + given.sum(1)
    return Batches(float(of.accepted[picked, given].mean()), rows, min(cap, MOST_NODES))


class Measured(NamedTuple):
    """Of one number of requests, with R bootstrap samples of the responses."""

    accepted: dict[tuple[str, Plan], np.ndarray]  # [R] drafted tokens per request and round
    rates: dict[str, dict[tuple[str, Plan], np.ndarray]]  # by name of the costs: [R] tokens per second of the batch

    def best(self, costs: str, way: str) -> Plan:
        """The plan with the most tokens per second, by the mean of the samples."""
        of = {plan: values.mean() for (name, plan), values in self.rates[costs].items() if name == way}
        return max(of, key=of.__getitem__)

    def accepted_at(self, way: str, width: float) -> np.ndarray:
        """The accepted tokens [R] of the levels and children that have most, with this mean number of nodes."""
        found = [values for (name, plan), values in self.accepted.items() if name == way and plan.width == width]
        return max(found, key=lambda values: float(values.mean()))

    def more_accepted(self, way: str, width: float) -> tuple[float, float]:
        """Tokens per round of this way over those of `SAME` with as many nodes, less 1; standard error."""
        mine, same = 1 + self.accepted_at(way, width), 1 + self.accepted_at(SAME, width)
        return float(mine.mean() / same.mean()) - 1, float((mine / same).std(ddof=1))

    def gain(self, costs: str, way: str) -> tuple[float, float]:
        """Tokens per second of this way's best plan over those of the best plan of `SAME`, less 1; standard error."""
        rates = self.rates[costs]
        ratios = rates[way, self.best(costs, way)] / rates[SAME, self.best(costs, SAME)]
        means = rates[way, self.best(costs, way)].mean() / rates[SAME, self.best(costs, SAME)].mean()
        return float(means) - 1, float(ratios.std(ddof=1))


def measure(
    rounds: Rounds, ranked: dict[tuple[str, int, int], Ranked], costs: dict[str, Costs],
    b: int, context: int, samples: int, batches: int, seed: int,
) -> Measured:  # fmt: skip
    """Draw batches of random rounds, from another choice of responses in each sample."""
    gen, responses = np.random.default_rng((seed, b)), rounds.responses()
    by_response = [np.flatnonzero(responses == text) for text in range(len(rounds.starts))]
    accepted: dict[tuple[str, Plan], list[float]] = {}
    rates: dict[str, dict[tuple[str, Plan], list[float]]] = {name: {} for name in costs}
    for _ in range(samples):
        chosen = np.concatenate([by_response[text] for text in gen.integers(0, len(by_response), len(by_response))])
        picked = chosen[gen.integers(0, len(chosen), (batches, b))]
        for way, plan, found in compare(ranked, picked):
            accepted.setdefault((way, plan), []).append(found.accepted)
            for name, of in costs.items():
                seconds = round_seconds(of, plan.steps, plan.topk, found.longest, found.rows, b, context)
                rates[name].setdefault((way, plan), []).append(b * (1 + found.accepted) / seconds)
    return Measured(
        {key: np.array(values) for key, values in accepted.items()},
        {name: {key: np.array(values) for key, values in of.items()} for name, of in rates.items()},
    )


def walk(
    rounds: Rounds, of: Ranked, plan: Plan, way: str, costs: Costs, b: int, context: int, batches: int, seed: int
) -> float:  # fmt: skip
    """Tokens per second of b requests whose rounds begin where their last ones ended; for rounds at every position.

    way: SAME or RAW. Requests in easy parts of their responses leave them in fewer rounds, so they are rarer in a batch
    than among random rounds. The rounds must be greedy: the accepted tokens are whole numbers.
    """
    gen, ends = np.random.default_rng((seed, b)), np.append(rounds.starts[1:], len(rounds.scores))
    at = gen.integers(0, len(rounds.scores), (batches, b))
    end = ends[rounds.responses()[at]]
    tokens, all_rows = 0.0, []
    for number in range(WARM_UP + WALKED):
        given = np.full((batches, b), round(plan.width) - 1)
        if way != SAME and plan.steps:
            given = allocate(of.estimates[at], [round(b * (plan.width - 1))])[0]
        accepted = of.accepted[at, given].astype(np.int64)
        if number >= WARM_UP:
            tokens += float(accepted.sum()) + at.size
            all_rows.append(b + given.sum(1))
        at += accepted + 1
        text = gen.integers(0, len(ends), at.shape)  # one that ended is followed by another one
        done = at >= end
        at, end = np.where(done, rounds.starts[text], at), np.where(done, ends[text], end)
    longest = round(plan.width) if way == SAME else MOST_NODES
    seconds = round_seconds(costs, plan.steps, plan.topk, longest, np.concatenate(all_rows), b, context)
    return tokens / (batches * WALKED) / seconds
