"""What measuring the host time of rounds needs, whichever engine they are of: requests, runs, marks in its code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from benchmarks.launches import Launch, Probe
from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.policy import Policy
from eagle_plugin.runtime.graphs import CapturedFunctions

MAX_BATCH, VOCABULARY, PROMPT_TOKENS, CONTEXT = 32, 512, 12, 2048
MAX_TOKENS = CONTEXT - 400  # of a request's answer
WARM_ROUNDS = 5  # of every run, not measured
SCHEDULER = "scheduler"  # the engine's work between two rounds


Choosers = Callable[["Run", Shape, Sequence[Shape]], ShapeChooser]  # of a run, the caps, and the captured shapes

MakePolicy = Callable[[Shape, Sequence[Shape] | None], Policy]  # of the caps, and the shapes if not all within them


def fixed_shapes(run: Run, caps: Shape, captured: Sequence[Shape]) -> ShapeChooser:
    """The caps in every round."""
    return ShapeChooser(caps, None)


def read_as_on_a_gpu(adapter: ModuleType) -> None:
    """Let the head read all places of the accepted paths: the copies that shorten them are made on CPUs only."""
    vars(adapter)["without_spare_places"] = lambda accepted: accepted


class Scenario(NamedTuple):
    """Requests that are decoded together."""

    name: str
    batch: int
    temperature: float = 0.0

    def prompt(self, number: int) -> list[int]:
        """The token ids of the prompt of one of its requests."""
        return [10 + (7 * number + 3 * i) % (VOCABULARY - 20) for i in range(PROMPT_TOKENS)]


def scenarios_of(batches: Sequence[tuple[int, float]]) -> list[Scenario]:
    """Of numbers of requests and their temperature."""
    return [Scenario(f"{'sampled' if heat else 'greedy'} {batch}", batch, heat) for batch, heat in batches]


class Run(NamedTuple):
    """Rounds of one scenario from its prefill on."""

    scenario: Scenario
    captured: bool  # by graphs, else eager
    rounds: int  # to measure
    counting: bool  # of launches; the times of such rounds mean nothing
    policy: str = "fixed"  # the value of EAGLE_POLICY


class Round(NamedTuple):
    """One decode round."""

    microseconds: dict[str, float]  # by phase, the scheduler's work before it included
    launches: dict[Launch, int]  # complete only if they were counted
    shape: Shape | None  # of the trees that it drafted

    @classmethod
    def of(cls, probe: Probe, shape: Shape | None) -> Round:
        """The round that a probe has just ended."""
        return cls({name: ns / 1e3 for name, ns in probe.phases.items()}, dict(probe.launches), shape)

    @property
    def worker(self) -> float:
        """Microseconds of the worker's step."""
        return sum(time for phase, time in self.microseconds.items() if phase != SCHEDULER)


def mark(probe: Probe, owner: Any, name: str, phase: str, after: str) -> None:
    """Let a call of owner.name be `phase`, and what follows it `after`."""
    call = getattr(owner, name)

    def marked(*args: Any, **kwargs: Any) -> Any:
        probe.enter(phase)
        try:
            return call(*args, **kwargs)
        finally:
            probe.enter(after)

    setattr(owner, name, marked)


def count_replays(probe: Probe, functions: CapturedFunctions) -> None:
    """Let what was captured be one launch."""
    run = functions.run

    def replay(key: tuple[Any, ...], function: Callable[[], Any]) -> Any:
        if key not in functions:
            return run(key, function)
        with probe.as_graph(key[0]):
            return run(key, function)

    functions.run = replay  # type: ignore[method-assign, assignment]
