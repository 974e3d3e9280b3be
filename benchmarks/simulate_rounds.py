"""Serves simulated requests: shapes chosen by the product's policy, or always the same one."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from benchmarks.simulate_targets import Machine
from benchmarks.simulate_traces import Outcomes
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.costs import CostModel
from eagle_plugin.policy.policy import Policy

NOISE = 0.03  # standard deviation of the logarithm of a round's time
SUM_ROUNDS = 4  # as in policy/chooser.py


class Served(NamedTuple):
    """What a number of rounds gave."""

    tokens: int
    seconds: float
    shapes: Counter[str]

    @property
    def rate(self) -> float:
        """Tokens per second of all requests."""
        return self.tokens / self.seconds


class Requests:
    """b requests, each walking through responses of a trace; a text that ends is followed by another one."""

    def __init__(self, outcomes: Outcomes, b: int, gen: np.random.Generator) -> None:
        self.outcomes, self.gen = outcomes, gen
        self.responses = gen.integers(0, len(outcomes.starts) - 1, b)
        first, end = outcomes.starts[self.responses], outcomes.starts[self.responses + 1]
        self.at = first + (gen.random(b) * (end - first)).astype(np.int64)

    def advance(self, tokens: np.ndarray) -> None:
        """Every request goes on by so many tokens."""
        self.at += tokens
        done = self.at >= self.outcomes.starts[self.responses + 1]
        self.responses[done] = self.gen.integers(0, len(self.outcomes.starts) - 1, int(done.sum()))
        self.at[done] = self.outcomes.starts[self.responses[done]]


def serve_policy(
    machine: Machine, outcomes: Outcomes, caps: Shape, b: int, context: int, warm_up: int, rounds: int
) -> Served:
    """Rounds of b requests with `context` tokens each, after a warm-up; what the policy sees is what an engine sees."""
    gen = np.random.default_rng(0)
    policy = Policy(caps, CostModel(machine.costs()), outcomes.shapes)
    requests, place = Requests(outcomes, b, gen), {shape: i for i, shape in enumerate(outcomes.shapes)}
    keys, tokens, total, shapes = b * context, 0, 0.0, Counter[str]()
    last, same = PLAIN, 0
    for number in range(warm_up + rounds):
        shape = policy.choose(b, keys)
        same = same + 1 if shape == last else 0
        last = shape
        seconds = machine.seconds(shape, b, keys) * math.exp(gen.normal(0, NOISE))
        accepted = outcomes.accepted[requests.at, place[shape]]
        if same:  # an engine times rounds that follow a round of their shape
            policy.observe_time(shape, b, keys, seconds)
        if shape != PLAIN:
            if same % SUM_ROUNDS == 0:
                means = outcomes.sums[requests.at].mean(0)
                covered = [x for x in outcomes.shapes if x.steps <= shape.steps and x.topk <= shape.topk]
                policy.observe_sums(shape, b, {x: means[place[x], : x.steps].tolist() for x in covered})
            reached = [int((accepted >= depth).sum()) for depth in range(1, shape.steps + 1)]
            policy.observe_accepted(shape, b, reached)
        requests.advance(accepted + 1)
        if number >= warm_up:
            tokens, total = tokens + int(accepted.sum()) + b, total + seconds
            shapes[str(shape)] += 1
    return Served(tokens, total, shapes)


def accept_length(outcomes: Outcomes, shape: Shape) -> float:
    """With the bonus token, in rounds of this shape: a round begins where the last one ended."""
    gen = np.random.default_rng(0)
    column = outcomes.shapes.index(shape)
    requests, total = Requests(outcomes, 256, gen), 0
    for _ in range(200):
        accepted = outcomes.accepted[requests.at, column]
        total += int(accepted.sum()) + len(accepted)
        requests.advance(accepted + 1)
    return total / (200 * 256)


def fixed_rate(machine: Machine, accepted: float, shape: Shape, b: int, context: int) -> float:
    """Tokens per second of rounds that always have this shape; accepted: the accept length."""
    return b * accepted / machine.seconds(shape, b, b * context)


def plain_rate(machine: Machine, b: int, context: int) -> float:
    """Tokens per second of plain decoding."""
    return b / machine.plain_seconds(b, b * context)
