"""Describes the result of the serving benchmark: one row per cell, and the measurements that it comes from."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from pydantic import Field

from eagle_plugin.bench.cells import Cell
from eagle_plugin.bench.measurement import Measurement, Results, mean_steal
from eagle_plugin.bench.outputs import Report, Settings, StealCount
from eagle_plugin.bench.prompt_kinds import PromptKind
from eagle_plugin.bench.quartiles import Quartiles, Strict
from eagle_plugin.bench.serving.configs import ALTERNATIVES, CONFIGS, Config
from eagle_plugin.policy.prediction_errors import median_error

PREDICTION_ERROR = (
    "median of |measured / predicted - 1| over the timed steps of the plugin's policy; the prediction is that before "
    "the step; null where none was timed"
)
FEW_CLIENTS = 4  # the summary's mean is over rows with at most so many


class ServingMeasurement(Measurement):
    """One server under one cell's load, once."""

    config: Config

    @property
    def server(self) -> Config:
        """The server."""
        return self.config


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


class ServingSettings(Settings):
    """What the results depend on."""

    answer_length: float = Field(description="part of the usual answer length; 1.0 without --quick")
    cache_tokens: int


class ServingReport(Report):
    """`out/serving.json`."""

    target: str
    head: str
    rows: list[Row]
    summary: Summary
    steal: StealCount
    settings: ServingSettings
    measurements: list[ServingMeasurement]


def build_rows(engine: str, measurements: Sequence[ServingMeasurement]) -> list[Row]:
    """One row per cell, in the order of their first measurement. ValueError if its servers have different repeats."""
    results = Results(measurements)
    return [_row(engine, cell, results) for cell in results.cells]


def _row(engine: str, cell: Cell, results: Results[ServingMeasurement]) -> Row:
    configs = [config for config in CONFIGS if results.of(cell, config)]
    found = [one for config in configs for one in results.of(cell, config)]
    rates = {config: value for config in configs if (value := results.quartiles(cell, config, "tokens_per_s"))}
    medians = {config: round(rate.median, 2) for config, rate in rates.items()}
    alternatives = [config for config in ALTERNATIVES if config in rates]
    best = max(alternatives, key=lambda config: rates[config].median, default=None)
    costs = results.medians(cell, "cpu_seconds_per_token", 9)
    cheapest = min(alternatives, key=lambda config: costs[config], default=None)
    over_best, over_fixed = results.ratio(cell, "plugin", best), results.ratio(cell, "plugin", "fixed")
    cpu_ratio = results.ratio(cell, "plugin", cheapest, "cpu_seconds_per_token")
    over_plain = {config: ratio for config in configs if (ratio := results.ratio(cell, config, "plain"))}
    return Row(
        engine=engine,
        **cell._asdict(),
        **{config: medians.get(config) for config in CONFIGS},  # type: ignore[arg-type]
        best_alternative=best,
        ratio_vs_best_alternative=over_best.median if over_best else None,
        ratio_vs_fixed=over_fixed.median if over_fixed else None,
        cpu_seconds_per_token={config: round(cost, 5) for config, cost in costs.items()},
        cpu_ratio_vs_best_alternative=cpu_ratio.median if cpu_ratio else None,
        accept_length=results.medians(cell, "accept_length", 3),
        ttft_ms=results.medians(cell, "ttft_ms", 1),
        tpot_ms=results.medians(cell, "tpot_ms", 2),
        steal=mean_steal(found),
        others=max(one.others for one in found),
        prediction_error=median_prediction_error(found),
        repeats=len(results.of(cell, configs[0])),
        spread=RowSpread(
            tokens_per_s=rates,
            ratio_vs_plain=over_plain,
            ratio_vs_best_alternative=over_best,
            ratio_vs_fixed=over_fixed,
        ),
    )


def median_prediction_error(measurements: Sequence[ServingMeasurement]) -> float | None:
    """Over the steps of all measurements together."""
    counts = [one.prediction_errors for one in measurements if one.config == "plugin" and one.prediction_errors]
    error = median_error([sum(classes) for classes in zip(*counts, strict=True)])
    return None if error is None else round(error, 4)


def summarise(rows: Sequence[Row], measurements: Sequence[ServingMeasurement]) -> Summary:
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
