"""What a round costs, measured on a round of toy models."""

from __future__ import annotations

import inspect
import math
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from key_world import KeyWorld, longest

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

from toy_engine import COLUMNS, ROWS, SHAPE, Drafter, ParallelDrafter, Verifier
from toy_parts import parts

from eagle_plugin.core.shape import PLAIN, Levels
from eagle_plugin.policy.costs import CostModel, Costs, Curve, Forward
from eagle_plugin.policy.policy import Policy
from eagle_plugin.policy.shapes import captured_shapes, shapes_within
from eagle_plugin.runtime import captured_rounds, long_prefixes
from eagle_plugin.runtime import round_costs as measuring
from eagle_plugin.runtime.graph_emulator import recording_launches
from eagle_plugin.sglang import round_costs
from eagle_plugin.sglang.round_costs import CostMeasurement

LANES = 8


class Clock:
    """Every reading is a millisecond later; forwards that take long advance it too."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-3
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(measuring, "time", made)
    monkeypatch.setattr(round_costs, "in_any_rank", bool)  # one rank, without the engine's groups
    return made


def curves(costs: Costs) -> list[Curve]:
    return [costs.target.curve, costs.level.curve, costs.extend.curve]


def test_every_part_is_measured_up_to_the_largest_batch() -> None:
    made = parts([])
    costs = CostMeasurement(made, LANES).run()
    target, level, extend = (set(curve.rows) for curve in curves(costs))
    sizes = [1, 2, 4, LANES]
    assert target >= {*sizes, *(b * SHAPE.width for b in sizes)}
    assert level == {b * SHAPE.topk for b in sizes}
    assert extend == {b * e for b in sizes for e in (2, SHAPE.max_accept_length)}
    for curve in curves(costs):
        assert min(curve.seconds) > 0 and list(curve.seconds) == sorted(curve.seconds)
    assert costs.round(SHAPE, LANES, 0) > costs.round(PLAIN, LANES, 0) > 0
    # Nothing is left behind.
    assert sorted(made.allocator.free_slots.tolist()) == list(range(1, ROWS * COLUMNS))
    assert not made.req_to_token.any() and not made.rng_keys.any()


def test_the_rows_of_a_parallel_head_are_levels() -> None:
    costs = CostMeasurement(parts([], ParallelDrafter), LANES).run()
    assert costs.levels is Levels.PARALLEL and CostMeasurement(parts([]), 1).run().levels is Levels.RECURRENT
    assert set(costs.level.curve.rows) == {b * (SHAPE.steps - 1) for b in (1, 2, 4, LANES)}


def test_a_spent_budget_leaves_out_larger_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_costs, "BUDGET_SECONDS", 0.0)
    costs = CostMeasurement(parts([]), LANES).run()
    assert max(costs.target.curve.rows) == SHAPE.width and costs.round(SHAPE, LANES, 0) > 0


def test_a_small_cache_leaves_out_larger_batches() -> None:
    made = parts([])
    made.allocator.free_slots = torch.arange(1, 110)  # of two requests
    assert max(CostMeasurement(made, LANES).run().level.curve.rows) == 2 * SHAPE.topk


def scaled(costs: Costs, factor: float) -> Costs:
    def of(forward: Forward) -> Forward:
        return Forward(Curve(forward.curve.rows, tuple(factor * x for x in forward.curve.seconds)))

    return Costs(of(costs.target), of(costs.level), of(costs.extend), draft=factor * costs.draft)


def test_costs_of_a_busy_machine_are_recognised() -> None:
    measurement = CostMeasurement(parts([]), 1)
    costs = measurement.run()
    assert measurement.is_faster_than(scaled(costs, 100.0))
    assert not measurement.is_faster_than(scaled(costs, 0.01))


def test_the_times_are_those_of_the_parts(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: where only the target takes long, only the target's curve is high."""
    forward = Verifier.forward

    def slow(self: Verifier, *given: Any, **named: Any) -> Any:
        clock.now += 1.0
        return forward(self, *given, **named)

    monkeypatch.setattr(Verifier, "forward", slow)
    costs = CostMeasurement(parts([]), 1).run()
    target, level, extend = (curve.seconds for curve in curves(costs))
    assert min(target) > 1 and max(level + extend) < 1 and costs.draft < 1


def slow_when_called(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not replayed takes a second from now on."""

    def slowed(call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*given: Any, **named: Any) -> Any:
            clock.now += 1.0
            return call(*given, **named)

        return slow

    for kind, name in ((Verifier, "forward"), (Verifier, "walk"), (Drafter, "draft_tree"), (Drafter, "extend")):
        monkeypatch.setattr(kind, name, slowed(getattr(kind, name)))


def test_costs_are_those_of_replays_where_rounds_are_captured(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shape is measured, or interpolated from one, that would run without graphs."""
    sizes = [1, 2, 4, LANES]
    with recording_launches():
        made = parts(sizes, shapes=captured_shapes(SHAPE))
        measurement = CostMeasurement(made, LANES)
        measurement._random.state(1)  # its template is made by calls
        slow_when_called(clock, monkeypatch)
        costs = measurement.run()
    assert max(max(curve.seconds) for curve in curves(costs)) < 0.1 and costs.draft < 0.1
    drafted = [shape for shape in captured_shapes(SHAPE) if shape != PLAIN]
    assert set(costs.target.curve.rows) == {b * shape.width for b in sizes for shape in (PLAIN, *drafted)}
    assert set(costs.extend.curve.rows) == {b * shape.max_accept_length for b in sizes for shape in drafted}
    assert set(costs.level.curve.rows) == {b * shape.topk for b in sizes for shape in drafted if shape.steps > 1}


@pytest.mark.parametrize("rows", [1024, 4 * SHAPE.width])
def test_a_captured_curve_has_no_time_without_graphs(rows: int, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that are too large for a shape, or for all, are not measured with it; nor are those between two captured
    sizes, whose rounds are padded."""
    monkeypatch.setattr(captured_rounds, "MAX_ROWS", rows)
    sizes = [1, 4] if rows == 1024 else [1, 4, LANES]
    with recording_launches():
        made = parts(sizes, shapes=captured_shapes(SHAPE))
        measurement = CostMeasurement(made, LANES)
        measurement._random.state(1)
        slow_when_called(clock, monkeypatch)
        costs = measurement.run()
    assert max(max(curve.seconds) for curve in curves(costs)) < 0.1 and costs.draft < 0.1
    wanted = {b * shape.width for b in sizes for shape in captured_shapes(SHAPE) if b * shape.width <= rows}
    assert set(costs.target.curve.rows) == wanted


def test_rounds_without_graphs_have_no_more_rows_than_captured_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_rounds, "MAX_ROWS", 2 * SHAPE.width)
    costs = CostMeasurement(parts([]), LANES).run()
    assert max(costs.target.curve.rows) == 2 * SHAPE.width and LANES in costs.target.curve.rows


def test_a_batch_without_memory_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is made all the same."""
    forward = Verifier.forward

    def limited(self: Verifier, batch: Any, *given: Any) -> Any:
        if batch.padded_b > 2:
            raise torch.OutOfMemoryError("no memory for the logits")
        return forward(self, batch, *given)

    monkeypatch.setattr(Verifier, "forward", limited)
    made = parts([])
    costs = CostMeasurement(made, LANES).run()
    assert set(costs.extend.curve.rows) == {b * e for b in (1, 2) for e in (2, SHAPE.max_accept_length)}
    assert Policy(SHAPE, CostModel(costs)).choose(LANES, 0) in shapes_within(SHAPE)
    assert len(made.allocator.free_slots) == ROWS * COLUMNS - 1


def test_the_costs_of_long_prefixes_do_not_depend_on_the_speed_of_the_moment(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor is slower by 1.6 half of the time; the slopes are what the work of a forward says.

    Of several servers: the median of one's four passes may have been disturbed.
    """
    monkeypatch.setattr(round_costs, "SHORT_PREFIX", 4)
    for module in (round_costs, long_prefixes):
        monkeypatch.setattr(module, "FIRST", 36)
    monkeypatch.setattr(round_costs, "BUDGET_SECONDS", math.inf)
    per_key, per_key_and_row = 0.2, 0.05
    speeds, forward, slowdown = random.Random(0), Verifier.forward, 1.6

    def paid(self: Verifier, batch: Any, *given: Any) -> Any:
        nonlocal slowdown
        slowdown = 2.6 - slowdown if speeds.random() < 0.05 else slowdown
        keys = int(batch.prefix_lens.sum())
        clock.now += slowdown * (10 + keys * (per_key + per_key_and_row * batch.shape.width))
        return forward(self, batch, *given)

    monkeypatch.setattr(Verifier, "forward", paid)
    targets = []
    for seed in range(5):
        speeds.seed(seed)
        targets.append(CostMeasurement(parts([]), LANES).run().target)
    assert statistics.median(one.per_key for one in targets) == pytest.approx(per_key, rel=0.15)
    assert statistics.median(one.per_key_and_row for one in targets) == pytest.approx(per_key_and_row, rel=0.15)


@pytest.mark.parametrize("share", [0.006, 0.03])
def test_costs_with_half_a_million_tokens(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the head share what is read of a prefix."""
    monkeypatch.setattr(round_costs, "BUDGET_SECONDS", math.inf)
    for seed in range(10):
        world, measurement = KeyWorld(share, seed), CostMeasurement(parts([]), 64)

        @contextmanager
        def requests(b: int, prefix: int) -> Iterator[Callable[..., Any]]:
            measurement._small_round = lambda: world.target(1, 1, 32)  # noqa: B023
            yield lambda shape: world.phases(shape, b, prefix)  # noqa: B023

        monkeypatch.setattr(measurement, "_random", SimpleNamespace(longest=longest))
        monkeypatch.setattr(measurement, "_requests", requests)
        costs = measurement.run()
        assert abs(world.error(costs, SHAPE)) < 0.05
        assert costs.level.per_key > 0 and costs.level.per_key_and_row == costs.extend.per_key_and_row == 0


def server(monkeypatch: pytest.MonkeyPatch, context: int = 4096, tokens: int = 100_000) -> Any:
    """What the key of kept costs asks of a worker."""
    monkeypatch.setattr(round_costs, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    monkeypatch.setattr(round_costs, "kernel_settings", lambda arguments: {})
    model = SimpleNamespace(quantization=None)
    return SimpleNamespace(
        target_worker=SimpleNamespace(
            model_runner=SimpleNamespace(device="cpu", dtype=torch.float32, model_config=model, kv_cache_dtype="auto")
        ),
        server_args=SimpleNamespace(model_path="target", speculative_draft_model_path="head"),
        shape=SHAPE,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.empty(0, context), size=LANES),
        token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: tokens),
        draft_worker=SimpleNamespace(levels=SimpleNamespace(kind=Levels.RECURRENT)),
        _round=SimpleNamespace(widest=lambda: []),
    )


def test_costs_belong_to_the_length_of_contexts_and_the_size_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of short prefixes nobody learns what a token of a long one costs."""
    keys = [
        round_costs._key(server(monkeypatch, **of))
        for of in ({}, {"context": 8192}, {"tokens": 200_000}, {"tokens": 1})
    ]
    assert len({str(key) for key in keys}) == 4
    assert round_costs._key(server(monkeypatch, tokens=101_000)) == keys[0]


def test_plain_rounds_count_what_the_head_reads_of_them() -> None:
    """Whenever a request has so many tokens that it has not read."""
    body = inspect.getsource(round_costs.choose_shapes)
    assert "most_deferred = worker._round.deferred.most" in body
