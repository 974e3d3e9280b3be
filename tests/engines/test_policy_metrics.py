"""The policy's metrics: as they are counted where the policy is, and as another process shows them."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from eagle_plugin.common.metric_registry import forget
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.costs import PHASES, CostModel, Costs, Curve, Forward
from eagle_plugin.policy.metric_table import POLICY
from eagle_plugin.policy.metrics import PolicyMetrics, families
from eagle_plugin.policy.policy import Policy
from eagle_plugin.policy.prediction_errors import BOUNDS
from eagle_plugin.policy.round_times import HostClock
from eagle_plugin.policy.served_rounds import ServedRound

CAPS = Shape(2, 2, 4)
FORWARD = Forward(Curve.of([(1, 0.01), (64, 0.02)]))
LABELS = {"model_name": "m", "engine": "0"}


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"eagle_plugin:{name}", LABELS | labels)


def served_chooser(clock: Clock) -> ShapeChooser:
    """After four steps of two requests, of which two have a known time."""
    shapes = ShapeChooser(CAPS, Policy(CAPS, CostModel(Costs(FORWARD, FORWARD, FORWARD))), clock=HostClock(clock))
    shapes.choose(2, 200)
    for kept in ([2, 1], [0, 0], [1, 1], [2, 2]):
        shapes.begin(CAPS, 2, 200)
        clock.now += 0.05
        shapes.observe(ServedRound(CAPS, 2, 200), kept)
    return shapes


def test_what_is_counted_and_expected() -> None:
    clock = Clock()
    shapes = served_chooser(clock)
    metrics = PolicyMetrics(LABELS, clock)
    metrics.record(shapes)
    metrics.record(shapes)  # nothing new
    report = shapes.report()
    assert value("shape_rounds_total", shape="2/2/4") == 8 and value("shape_tokens_total", shape="2/2/4") == 17
    assert value("shape_steps_total", shape="2/2/4") == 4 and value("timed_steps_total", shape="2/2/4") == 2
    assert value("step_seconds_total", shape="2/2/4") == pytest.approx(0.1)
    assert value("predicted_step_seconds_total", shape="2/2/4") == pytest.approx(report.totals[CAPS].predicted)
    assert value("shape_rounds_total", shape="0/1/1") is None
    phases = [value("predicted_phase_seconds_total", phase=phase) for phase in PHASES]
    assert phases == list(report.phases.values()) and sum(phases) == pytest.approx(report.totals[CAPS].predicted)
    assert value("prediction_error_steps_total", le="+Inf") == sum(report.errors) == 2
    assert value("prediction_error_steps_total", le="0.2") == sum(report.errors[: BOUNDS.index(0.2) + 1])
    for shape, rate in report.rates().items():
        assert value("expected_tokens_per_second", shape=str(shape)) == rate
        assert value("expected_step_seconds", shape=str(shape)) == report.expected[shape].seconds
        assert value("chosen_shape", shape=str(shape)) == (shape == report.present)
    assert [value("calibration_factor", depth=depth) for depth in "12"] == list(report.factors)
    assert value("slowdown") == report.slowdown
    assert (value("policy_requests"), value("policy_prefix_tokens")) == (2, 200)
    forget()
    assert "eagle_plugin:" not in generate_latest().decode()


def test_counters_follow_every_round_and_gauges_once_per_second() -> None:
    clock = Clock()
    shapes = served_chooser(clock)
    metrics = PolicyMetrics(LABELS, clock)
    metrics.record(shapes)
    shapes.choose(3, 300)
    shapes.observe(ServedRound(PLAIN, 3, 300), [0, 0, 0])
    clock.now += 0.9
    metrics.record(shapes)
    assert value("shape_rounds_total", shape="0/1/1") == 3 and value("policy_requests") == 2
    clock.now += 0.2
    metrics.record(shapes)
    assert value("shape_rounds_total", shape="0/1/1") == 3 and value("policy_requests") == 3
    forget()


def test_steps_are_counted_once() -> None:
    """What a report counts is counted again with each report."""
    clock = Clock()
    shapes = served_chooser(clock)
    metrics = PolicyMetrics(LABELS, clock)
    for _ in range(3):
        metrics.record(shapes)
        clock.now += 2
    assert value("prediction_error_steps_total", le="+Inf") == 2
    shapes.begin(CAPS, 2, 200)
    metrics.record(shapes)
    assert value("prediction_error_steps_total", le="+Inf") == 3
    assert sum(value("predicted_phase_seconds_total", phase=phase) for phase in PHASES) == pytest.approx(
        shapes.report().totals[CAPS].predicted
    )
    forget()


def test_without_a_policy_rounds_are_counted_only() -> None:
    shapes = ShapeChooser(CAPS, None)
    shapes.observe(ServedRound(CAPS, 1, 10), [1])
    PolicyMetrics(LABELS).record(shapes)
    assert value("shape_rounds_total", shape="2/2/4") == 1
    assert "expected_tokens_per_second{" not in generate_latest().decode() and value("slowdown") is None
    forget()


def test_another_process_shows_the_same() -> None:
    """Every sample of the two ways, names and labels included."""
    clock = Clock()
    shapes = served_chooser(clock)
    shapes.looked_up = lambda: (7, 3)
    PolicyMetrics(LABELS, clock).record(shapes)

    class Collector:
        def collect(self) -> object:
            return families([(shapes.report(), LABELS)])

    other = CollectorRegistry()
    other.register(Collector())

    def samples(registry: CollectorRegistry) -> dict[str, float]:
        lines = generate_latest(registry).decode().splitlines()
        pairs = [line.rpartition(" ") for line in lines if line.startswith("eagle_plugin:")]
        return {name: float(number) for name, _, number in pairs if "_created" not in name}

    here = samples(REGISTRY)
    assert here == samples(other)
    assert {name.partition("{")[0].removeprefix("eagle_plugin:").removesuffix("_total") for name in here} == {
        metric.name for metric in POLICY
    }
    forget()


def test_before_the_first_report_there_are_names_without_values() -> None:
    made = list(families([(None, LABELS)]))
    assert [family.name.removeprefix("eagle_plugin:") for family in made] == [metric.name for metric in POLICY]
    assert not any(family.samples for family in made)
