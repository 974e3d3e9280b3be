"""What is measured where few batch sizes have graphs, or memory runs out; test_graphs.py has the costs of an engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from key_world import KeyWorld, longest

from eagle_plugin.core.shape import PLAIN, Levels, Shape
from eagle_plugin.policy.shapes import captured_shapes
from eagle_plugin.runtime import captured_rounds
from eagle_plugin.runtime.graphs import Buckets
from eagle_plugin.runtime.long_prefixes import growing_batches
from eagle_plugin.runtime.round_costs import Phases
from eagle_plugin.vllm import captured_costs

CAPS = Shape(5, 3, 16)
PREFIX = 16


class Timer:
    """Contexts are short, and caches have room for all rounds."""

    longest = short = PREFIX

    def __init__(self, *_: Any) -> None:
        pass

    def fits(self, *_: Any) -> bool:
        return True

    def long_batches(self, *_: Any) -> list[tuple[int, int]]:
        return []

    def target(self, b: int, rows: int, prefix: int) -> float:
        return 1.0

    def prompt_token(self) -> float:
        return 1.0


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Shape, int]]:
    """Rounds that ran, as shape and requests."""
    found: list[tuple[Shape, int]] = []

    def phases(rounds: Any, shape: Shape, b: int, prefix: int) -> Phases:
        assert shape in rounds._step.shapes_at(b), "as the functions of a step assert"
        found.append((shape, b))
        return Phases(1.0, float(shape.width), 1.0)

    monkeypatch.setattr(captured_costs, "RoundTimer", Timer)
    monkeypatch.setattr(captured_costs.CapturedRounds, "phases", phases)
    monkeypatch.setattr(captured_costs, "in_any_rank", bool)
    return found


def runner(sizes: list[int]) -> Any:
    """With graphs for these batch sizes."""
    step: Any = captured_rounds.CapturedRounds()
    step.shapes, step._buckets = tuple(captured_shapes(CAPS)), Buckets(sizes)
    step.has_plain = lambda size: False
    levels = SimpleNamespace(kind=Levels.RECURRENT)
    return SimpleNamespace(device="cpu", drafter=SimpleNamespace(levels=levels), _step=step)


@pytest.mark.parametrize(("size", "widest"), [(64, 16), (72, 8), (512, 2)])
def test_kept_costs_are_compared_with_a_round_that_has_graphs(
    size: int, widest: int, ran: list[tuple[Shape, int]]
) -> None:
    """Where the fewest requests with graphs are many, the caps have none."""
    served = runner([size, size + 8])
    costs = captured_costs.measure(served, CAPS)
    ran.clear()
    assert not captured_costs.is_faster_than(served, CAPS, costs)
    assert {(shape.width, b) for shape, b in ran} == {(widest, size)}
    curve = costs.target.curve
    busy = curve._replace(seconds=tuple(10 * seconds for seconds in curve.seconds))
    assert captured_costs.is_faster_than(served, CAPS, costs._replace(target=costs.target._replace(curve=busy)))


def refuse(monkeypatch: pytest.MonkeyPatch, from_run: int, size: int) -> None:
    """Rounds of this size and larger ones have no memory, from the n-th round on."""
    phases: Callable[..., Phases] = captured_costs.CapturedRounds.phases
    runs = [0]

    def tight(rounds: Any, shape: Shape, b: int, prefix: int) -> Phases:
        runs[0] += 1
        if b >= size and runs[0] >= from_run:
            raise torch.OutOfMemoryError("no memory")
        return phases(rounds, shape, b, prefix)

    monkeypatch.setattr(captured_costs.CapturedRounds, "phases", tight)


@pytest.mark.parametrize("from_run", [1, 2, 6], ids=["the first run", "the next shape", "a run that is timed"])
def test_without_memory_for_the_smallest_rounds_there_are_no_costs(
    from_run: int, ran: list[tuple[Shape, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is no round: that there is room for it gives no curve."""
    assert len([shape for shape in runner([72])._step.shapes_at(72) if shape != PLAIN]) == 4
    refuse(monkeypatch, from_run, 72)
    with pytest.raises(torch.OutOfMemoryError, match="the smallest round"):
        captured_costs.measure(runner([72]), CAPS)


def test_all_ranks_end_where_one_has_no_memory_for_the_first_run(
    ran: list[tuple[Shape, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_costs, "in_any_rank", lambda mine: True)
    with pytest.raises(torch.OutOfMemoryError, match="the smallest round"):
        captured_costs.measure(runner([72]), CAPS)
    assert len(ran) == 1


def test_larger_rounds_without_memory_are_left_out(
    ran: list[tuple[Shape, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, 1, 128)
    costs = captured_costs.measure(runner([72, 128]), CAPS)
    assert costs.plain is not None and costs.plain.curve.rows == (72,) and costs.prompt_token == 1.0


@pytest.mark.parametrize("share", [0.006, 0.03])
def test_costs_with_half_a_million_tokens(
    share: float, ran: list[tuple[Shape, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Timer, "long_batches", lambda _, sizes, width: growing_batches(sizes, longest))
    for seed in range(10):
        world = KeyWorld(share, seed)
        monkeypatch.setattr(captured_costs.CapturedRounds, "phases", lambda _, *of: world.phases(*of))  # noqa: B023
        monkeypatch.setattr(captured_costs.CapturedRounds, "plain", lambda _, b, n: world.target(b, 1, n))  # noqa: B023
        monkeypatch.setattr(Timer, "target", lambda _, *of: world.target(*of))  # noqa: B023
        costs = captured_costs.measure(runner([1, 2, 4, 8, 16, 32, 64]), CAPS, budget=math.inf)
        assert abs(world.error(costs, CAPS)) < 0.05
