"""Names the plugin's Prometheus metrics of rounds and of the policy: what writes them and what reads them uses this.

No torch and no Prometheus client here: commands read metrics without an engine. docs/metrics.md has the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.prediction_errors import counts_of, cumulated
from eagle_plugin.policy.report import Expected, PolicyReport, ShapeTotals, shape_of

Values = Mapping[str, Mapping[str, float]]  # by name as it is exported, then by the value of the metric's own label


class Metric(NamedTuple):
    """One metric."""

    name: str  # without the prefix, and without what the Prometheus client adds to the name of a counter
    what: str
    label: str = ""  # its own one, after the engine's; "" without one
    kind: Literal["counter", "gauge", "histogram"] = "counter"

    @property
    def exported(self) -> str:
        """The name of its samples, without the prefix."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def own_labels(self) -> tuple[str, ...]:
        """None, or one."""
        return (self.label,) if self.label else ()


def gauge(name: str, label: str, what: str) -> Metric:
    """A metric that is set, not counted."""
    return Metric(name, what, label, "gauge")


# Of verified trees, counted in every round (`runtime/round_metrics.py`).
VERIFY_ROUNDS = Metric("verify_rounds", "Trees that the target verified.")
DRAFTED_TOKENS = Metric("drafted_tokens", "Drafted tokens that the target verified.")
ACCEPTED_TOKENS = Metric("accepted_tokens", "Drafted tokens that were kept.")
ACCEPTED_AT_DEPTH = Metric("accepted_at_depth", "Rounds that kept a drafted token of this depth.", "depth")
EAGER_STEPS = Metric(
    "eager_steps", "Steps of a server with graphs whose walk over the trees ran without one.", "reason"
)
ACCEPT_LENGTH = Metric(
    "accept_length", "Tokens that a round yields, the target's own (bonus) token included.", kind="histogram"
)
REJECTED_ROUNDS = gauge("rejected_rounds", "", "Rounds in a row, up to the latest, that kept no drafted token.")

# Of the policy, counted by shape in every round: the metric of each field of `ShapeTotals`.
TOTALS = {
    "rounds": Metric("shape_rounds", "Rounds of requests, plain ones too.", "shape"),
    "tokens": Metric("shape_tokens", "Tokens that rounds yielded, the target's own (bonus) tokens included.", "shape"),
    "steps": Metric("shape_steps", "Rounds of batches.", "shape"),
    "timed": Metric("timed_steps", "Rounds of batches whose time is known.", "shape"),
    "seconds": Metric("step_seconds", "Seconds that the timed steps took.", "shape"),
    "predicted": Metric("predicted_step_seconds", "Seconds that the policy expected of the timed steps.", "shape"),
}

# Of the policy, from its reports.
PHASE_SECONDS = Metric(
    "predicted_phase_seconds",
    "Seconds that the policy expected of this phase of the timed steps; no phase is timed.",
    "phase",
)
ERROR_STEPS = Metric("prediction_error_steps", "Timed steps with |measured / predicted - 1| up to this.", "le")
LOOKED_UP = Metric("looked_up_tokens", "Drafted tokens that only looked-up paths brought into trees.")
LOOKED_UP_ACCEPTED = Metric("looked_up_accepted_tokens", "Of these, tokens that were kept.")
RATE = gauge(
    "expected_tokens_per_second",
    "shape",
    "What the policy expects of the present batch, if its rounds have this shape.",
)
SECONDS = gauge(
    "expected_step_seconds", "shape", "What the policy expects of one step of the present batch with this shape."
)
CHOSEN = gauge("chosen_shape", "shape", "1 for the shape that the policy chooses at present, 0 for the others.")
FACTOR = gauge("calibration_factor", "depth", "Accepted over predicted tokens of this depth.")
SLOWDOWN = gauge("slowdown", "", "Seconds of a step over those that were measured at the start, of all shapes.")
READING = gauge(
    "prompt_reading_seconds", "", "Seconds per output token in which the head reads prompts, if trees are drafted."
)
REQUESTS = gauge("policy_requests", "", "Requests of the present batch.")
PREFIX_TOKENS = gauge("policy_prefix_tokens", "", "Tokens of the prefixes of the present batch.")


def _if_expected(value: Callable[[PolicyReport], float]) -> Callable[[PolicyReport], Mapping[str, float]]:
    return lambda report: {"": value(report)} if report.expected else {}


def _of_shapes(values: Mapping[Shape, float]) -> dict[str, float]:
    return {str(shape): float(value) for shape, value in values.items()}


# What a report has of each metric, by the value of the metric's own label; without one under "".
OF_REPORT: dict[Metric, Callable[[PolicyReport], Mapping[str, float]]] = {
    PHASE_SECONDS: lambda report: report.phases,
    ERROR_STEPS: lambda report: cumulated(report.errors),
    LOOKED_UP: lambda report: {"": report.looked_up[0]} if report.looked_up else {},
    LOOKED_UP_ACCEPTED: lambda report: {"": report.looked_up[1]} if report.looked_up else {},
    RATE: lambda report: _of_shapes(report.rates()),
    SECONDS: lambda report: _of_shapes({shape: x.seconds for shape, x in report.expected.items()}),
    CHOSEN: lambda report: _of_shapes({shape: shape == report.present for shape in report.expected}),
    FACTOR: lambda report: {str(depth): factor for depth, factor in enumerate(report.factors, start=1)},
    SLOWDOWN: _if_expected(lambda report: report.slowdown),
    READING: _if_expected(lambda report: report.reading),
    REQUESTS: _if_expected(lambda report: report.requests),
    PREFIX_TOKENS: _if_expected(lambda report: report.prefix_tokens),
}
POLICY = (*TOTALS.values(), *OF_REPORT)  # in the order in which they are exported
LABELS = ("shape", "depth", "phase", "le", "reason")  # all that are a metric's own


def report_of(values: Values) -> PolicyReport:
    """The inverse: the report whose metrics have these values.

    Raises:
        KeyError, ValueError, IndexError, ArithmeticError: they are of another form.
    """

    def of(metric: Metric) -> Mapping[str, float]:
        return values.get(metric.exported, {})

    requests, reading = of(REQUESTS)[""], of(READING)[""]
    totals: dict[Shape, ShapeTotals] = {}
    for field, metric in TOTALS.items():
        kind = type(getattr(ShapeTotals(), field))
        for label, value in of(metric).items():
            totals[shape_of(label)] = totals.get(shape_of(label), ShapeTotals()).plus(**{field: kind(value)})
    expected = {}
    for label, seconds in of(SECONDS).items():
        rate, shape = of(RATE)[label], shape_of(label)
        share = 0.0 if shape == PLAIN else rate * reading  # of the time, in which the head reads prompts
        expected[shape] = Expected(seconds, rate * seconds / (1 - share) / requests)
    return PolicyReport(
        mode="auto",
        caps=max(expected, key=lambda shape: (shape.width, shape.steps, shape.topk)),
        present=[shape_of(label) for label, chosen in of(CHOSEN).items() if chosen == 1][0],
        requests=int(requests),
        prefix_tokens=int(of(PREFIX_TOKENS)[""]),
        slowdown=of(SLOWDOWN)[""],
        factors=tuple(factor for _, factor in sorted(of(FACTOR).items(), key=lambda x: int(x[0]))),
        totals=totals,
        expected=expected,
        reading=reading,
        phases=dict(of(PHASE_SECONDS)),
        errors=counts_of(of(ERROR_STEPS)),
        looked_up=tuple(int(of(metric)[""]) for metric in (LOOKED_UP, LOOKED_UP_ACCEPTED) if of(metric)),
    )
