"""Measurements and reports of the serving benchmark with known numbers."""

from collections.abc import Mapping, Sequence

from eagle_plugin.bench.cells import Cell
from eagle_plugin.bench.machine import describe_machine
from eagle_plugin.bench.outputs import StealCount
from eagle_plugin.bench.serving.configs import Config
from eagle_plugin.bench.serving.report import (
    ServingMeasurement,
    ServingReport,
    ServingSettings,
    build_rows,
    summarise,
)

ONE = Cell(1, 0.0, "mixed")
MANY = Cell(16, 0.0, "mixed")
# Tokens per second of each repeat. In the second repeat of ONE the machine is slow.
RATES: dict[Cell, dict[Config, list[float]]] = {
    ONE: {
        "plain": [20.0, 10.0, 20.0],
        "builtin_chain": [26.0, 13.0, 27.0],
        "builtin_tree": [30.0, 12.0, 30.0],
        "fixed": [40.0, 20.0, 40.0],
        "plugin": [45.0, 24.0, 48.0],
    },
    MANY: {
        "plain": [100.0, 100.0, 100.0],
        "builtin_chain": [90.0, 90.0, 90.0],
        "builtin_tree": [60.0, 60.0, 60.0],
        "fixed": [80.0, 80.0, 80.0],
        "plugin": [95.0, 96.0, 97.0],
    },
}


def measurement(repeat: int, cell: Cell, config: Config, rate: float, steal: float | None = 0.01) -> ServingMeasurement:
    return ServingMeasurement(
        repeat=repeat, concurrency=cell.concurrency, temperature=cell.temperature, prompts=cell.prompts, config=config,
        tokens_per_s=rate, seconds=2.0, tokens=round(2 * rate), requests=3, cpu_seconds_per_token=1.5 / rate,
        requests_per_s=rate / 50, ttft_ms=100.0, tpot_ms=1000 / rate, itl_ms=None, otps=None,
        accept_length=None if config == "plain" else 2.0, accepted=[], steal=steal, others=0.25,
    )  # fmt: skip


def measurements(rates: Mapping[Cell, Mapping[Config, Sequence[float]]] = RATES) -> list[ServingMeasurement]:
    return [
        measurement(repeat, cell, config, rate)
        for cell, configs in rates.items()
        for config, values in configs.items()
        for repeat, rate in enumerate(values)
    ]


def serving_report(rates: Mapping[Cell, Mapping[Config, Sequence[float]]] = RATES) -> ServingReport:
    rows = build_rows("sglang", measurements(rates))
    return ServingReport(
        engine="sglang", engine_version="0.5.23", target="smol", head="smol-eagle3",
        rows=rows, summary=summarise(rows, measurements(rates)),
        steal=StealCount(limit=0.05, spans=30, over_limit=3, repeated=2, over_limit_share=0.1),
        settings=ServingSettings(threads=2, shapes={"plugin": "2/4/8"}, answer_length=1.0, cache_tokens=4096,
                                 busy_percent=1.0),
        versions={"sglang": "0.5.23"}, machine=describe_machine(), date="2026-01-01T00:00:00+00:00",
        measurements=measurements(rates),
    )  # fmt: skip
