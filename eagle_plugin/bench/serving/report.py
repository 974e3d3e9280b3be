"""The result of the serving benchmark: one row per cell, and the measurements that it comes from."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pydantic import Field

from eagle_plugin.bench.machine import Machine
from eagle_plugin.bench.measure import ratio_spread, spread
from eagle_plugin.bench.report import Quartiles, Strict, quartiles
from eagle_plugin.bench.serving.configs import ALTERNATIVES, CONFIGS, Config
from eagle_plugin.bench.serving.plan import Cell
from eagle_plugin.bench.serving.prompts import PromptKind
from eagle_plugin.policy.prediction_errors import median_error

PREDICTION_ERROR = (
    "median of |measured / predicted - 1| over the timed steps of the plugin's policy; the prediction is that before "
    "the step; null where none was timed"
)
FEW_CLIENTS = 4  # the summary's mean is over rows with at most so many
Value = TypeVar("Value")


class Measurement(Strict):
    """One server under one cell's load, once."""

    repeat: int
    concurrency: int
    temperature: float
    prompts: PromptKind
    config: Config
    tokens_per_s: float = Field(gt=0, description="output tokens per second while all clients were busy")
    seconds: float = Field(gt=0, description="how long all clients were busy")
    tokens: int = Field(gt=0, description="output tokens in that time")
    requests: int
    cpu_seconds_per_token: float = Field(ge=0)
    ttft_ms: float
    tpot_ms: float
    accept_length: float | None = Field(
        description="tokens per round, with the bonus token; a plain round counts as one; null without speculation"
    )
    steal: float | None = Field(description="stolen part of the processor time that was wanted; null if unknown")
    others: float = Field(ge=0, le=1, description="part of the machine that other processes used meanwhile")
    prediction_errors: tuple[int, ...] = Field(
        default=(), description="timed steps by the error of their prediction (policy/prediction_errors.py)"
    )

    @property
    def cell(self) -> Cell:
        """The kind of load."""
        return Cell(self.concurrency, self.temperature, self.prompts)


class RowSpread(Strict):
    """Quartiles over the repeats; ratios are taken repeat by repeat."""

    tokens_per_s: dict[Config, Quartiles]
    ratio_vs_plain: dict[Config, Quartiles]
    ratio_vs_best_alternative: Quartiles | None
    ratio_vs_fixed: Quartiles | None


class Row(Strict):
    """One cell: medians over the repeats. The field of a configuration is its tokens per second; null: not measured."""

    engine: str
    concurrency: int
    temperature: float
    prompts: PromptKind
    plain: float | None
    builtin_chain: float | None
    builtin_tree: float | None
    fixed: float | None
    plugin: float | None
    best_alternative: Config | None = Field(description="the fastest of plain, builtin_chain and builtin_tree")
    ratio_vs_best_alternative: float | None = Field(description="tokens per second, plugin / best_alternative")
    ratio_vs_fixed: float | None = Field(description="tokens per second, plugin / fixed")
    cpu_seconds_per_token: dict[Config, float]
    cpu_ratio_vs_best_alternative: float | None = Field(
        description="plugin / the alternative with the least processor time per token; below 1 the plugin uses less"
    )
    accept_length: dict[Config, float]
    ttft_ms: dict[Config, float]
    tpot_ms: dict[Config, float]
    steal: float | None = Field(description="mean steal of the measurements that the row comes from")
    others: float = Field(description="the most that other processes used of the machine during one of them")
    prediction_error: float | None = Field(description=PREDICTION_ERROR)
    repeats: int
    spread: RowSpread


class WorstRow(Strict):
    """The row with the lowest ratio."""

    concurrency: int
    temperature: float
    prompts: PromptKind
    ratio: float


class Summary(Strict):
    """The rows in four numbers; null where no row has the ratio."""

    geometric_mean_ratio_1_to_4: float | None = Field(
        description="of ratio_vs_best_alternative, over the rows with 1 to 4 clients"
    )
    worst_row: WorstRow | None = Field(description="of ratio_vs_best_alternative, over all rows")
    worst_ratio_vs_fixed: float | None
    worst_row_vs_fixed: WorstRow | None
    prediction_error: float | None = Field(description=PREDICTION_ERROR)


class StealCount(Strict):
    """How often the host gave the machine's processor time to others, since the start or the last --resume."""

    limit: float
    spans: int = Field(description="measured spans, repeated ones included; 0: steal is unknown here")
    over_limit: int = Field(description="of them, spans with more steal than the limit")
    repeated: int
    over_limit_share: float | None


class ServingSettings(Strict):
    """What the results depend on."""

    dtype: str = "bfloat16"
    device: str = "cpu"
    threads: int
    shapes: dict[str, str] = Field(description="steps/topk/draft tokens that each server was started with")
    answer_length: float = Field(description="part of the usual answer length; 1.0 without --quick")
    cache_tokens: int
    busy_percent: float = Field(description="use of all cores by other processes before the first measurement")


class ServingReport(Strict):
    """`out/serving.json`."""

    engine: str
    engine_version: str
    target: str
    head: str
    rows: list[Row]
    summary: Summary
    steal: StealCount
    settings: ServingSettings
    versions: dict[str, str]
    machine: Machine
    date: str
    measurements: list[Measurement]


def build_rows(engine: str, measurements: Sequence[Measurement]) -> list[Row]:
    """One row per cell, in the order of their first measurement."""
    cells = dict.fromkeys(measurement.cell for measurement in measurements)
    return [_row(engine, cell, [one for one in measurements if one.cell == cell]) for cell in cells]


def _row(engine: str, cell: Cell, measurements: Sequence[Measurement]) -> Row:
    by_config: dict[Config, list[Measurement]] = {}
    for config in CONFIGS:
        found = sorted((one for one in measurements if one.config == config), key=lambda one: one.repeat)
        if found:
            by_config[config] = found
    repeats = {tuple(one.repeat for one in found) for found in by_config.values()}
    if len(repeats) > 1:
        raise ValueError(f"{cell}: the configurations have different repeats ({sorted(repeats)}); run with --resume")
    rates = _each(by_config, lambda one: one.tokens_per_s)
    costs = _each(by_config, lambda one: one.cpu_seconds_per_token)
    medians = {config: round(spread(values).median, 2) for config, values in rates.items()}
    best = max((c for c in ALTERNATIVES if c in rates), key=lambda c: spread(rates[c]).median, default=None)
    cheapest = min((c for c in ALTERNATIVES if c in costs), key=lambda c: spread(costs[c]).median, default=None)
    over_best, over_fixed = _ratio(rates, "plugin", best), _ratio(rates, "plugin", "fixed")
    cpu_ratio = _ratio(costs, "plugin", cheapest)
    over_plain = {config: _ratio(rates, config, "plain") for config in rates if config != "plain"}
    steals = [one.steal for one in measurements if one.steal is not None]
    return Row(
        engine=engine,
        concurrency=cell.concurrency,
        temperature=cell.temperature,
        prompts=cell.prompts,
        **{config: medians.get(config) for config in CONFIGS},  # type: ignore[arg-type]
        best_alternative=best,
        ratio_vs_best_alternative=over_best.median if over_best else None,
        ratio_vs_fixed=over_fixed.median if over_fixed else None,
        cpu_seconds_per_token={config: round(spread(values).median, 5) for config, values in costs.items()},
        cpu_ratio_vs_best_alternative=cpu_ratio.median if cpu_ratio else None,
        accept_length=_medians(by_config, lambda one: one.accept_length, 3),
        ttft_ms=_medians(by_config, lambda one: one.ttft_ms, 1),
        tpot_ms=_medians(by_config, lambda one: one.tpot_ms, 2),
        steal=round(statistics.mean(steals), 4) if steals else None,
        others=max(one.others for one in measurements),
        prediction_error=median_prediction_error(measurements),
        repeats=len(next(iter(by_config.values()))),
        spread=RowSpread(
            tokens_per_s={config: quartiles(spread(values)) for config, values in rates.items()},
            ratio_vs_plain={config: ratio for config, ratio in over_plain.items() if ratio},
            ratio_vs_best_alternative=over_best,
            ratio_vs_fixed=over_fixed,
        ),
    )


def _each(
    by_config: Mapping[Config, Sequence[Measurement]], value: Callable[[Measurement], Value]
) -> dict[Config, list[Value]]:
    return {config: [value(one) for one in found] for config, found in by_config.items()}


def _medians(
    by_config: Mapping[Config, Sequence[Measurement]], value: Callable[[Measurement], float | None], digits: int
) -> dict[Config, float]:
    known = {
        config: [number for number in values if number is not None]
        for config, values in _each(by_config, value).items()
    }
    return {config: round(spread(values).median, digits) for config, values in known.items() if values}


def _ratio(values: Mapping[Config, Sequence[float]], ours: Config, theirs: Config | None) -> Quartiles | None:
    if theirs is None or ours not in values or theirs not in values:
        return None
    if 0.0 in values[theirs]:  # processor time below the clock tick of the operating system
        return None
    return quartiles(ratio_spread(values[ours], values[theirs]))


def median_prediction_error(measurements: Sequence[Measurement]) -> float | None:
    """Over the steps of all measurements together."""
    counts = [one.prediction_errors for one in measurements if one.config == "plugin" and one.prediction_errors]
    error = median_error([sum(classes) for classes in zip(*counts, strict=True)])
    return None if error is None else round(error, 4)


def summarise(rows: Sequence[Row], measurements: Sequence[Measurement]) -> Summary:
    """The summary of the rows, which come from the measurements."""
    few = [
        row.ratio_vs_best_alternative
        for row in rows
        if row.ratio_vs_best_alternative and row.concurrency <= FEW_CLIENTS
    ]
    worst_vs_fixed = _worst(rows, lambda row: row.ratio_vs_fixed)
    return Summary(
        geometric_mean_ratio_1_to_4=round(statistics.geometric_mean(few), 3) if few else None,
        worst_row=_worst(rows, lambda row: row.ratio_vs_best_alternative),
        worst_ratio_vs_fixed=worst_vs_fixed.ratio if worst_vs_fixed else None,
        worst_row_vs_fixed=worst_vs_fixed,
        prediction_error=median_prediction_error(measurements),
    )


def _worst(rows: Sequence[Row], ratio: Callable[[Row], float | None]) -> WorstRow | None:
    known = [(value, row) for row in rows if (value := ratio(row)) is not None]
    if not known:
        return None
    value, row = min(known, key=lambda pair: pair[0])
    return WorstRow(concurrency=row.concurrency, temperature=row.temperature, prompts=row.prompts, ratio=value)
