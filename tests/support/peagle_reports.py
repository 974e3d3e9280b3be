"""Measurements and reports of the benchmark of P-EAGLE with known numbers."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peagle_report import (
    Config,
    PEagleMeasurement,
    PEagleReport,
    build_rows,
    draft_time_ratio,
    group_configs,
)
from eagle_plugin.bench.machine import describe_machine
from eagle_plugin.bench.outputs import StealCount
from eagle_plugin.bench.serving.report import ServingSettings

PLAIN = (20.0, 10.0, 20.0)  # tokens per second; the machine is slow in the second repeat
FACTORS = {"plain": 1.0, "eagle3": 1.5, "peagle": 1.8}


def draft_ms(config: Config) -> float | None:
    """Three milliseconds per forward after the first level; a P-EAGLE head has one, with 0.1 ms per row."""
    rows = config.shape.steps - 1
    return {"plain": None, "eagle3": 3.0 * rows, "peagle": 3.0 + 0.1 * rows}[config.kind]


def measurement(config: Config, repeat: int, concurrency: int = 1) -> PEagleMeasurement:
    return PEagleMeasurement(
        repeat=repeat, concurrency=concurrency, prompts="mixed", kind=config.kind, form=config.form,
        shape=tuple(config.shape), tokens_per_s=PLAIN[repeat] * FACTORS[config.kind], seconds=2.0, requests=3,
        tokens=40, requests_per_s=1.0, ttft_ms=100.0, tpot_ms=50.0, itl_ms=None, otps=None, accepted=[],
        accept_length=None if config.kind == "plain" else 2.0, draft_ms=draft_ms(config), drafted_rounds=100,
        memory_mib=1500.0 + config.shape.steps, steal=0.01, others=0.25,
    )  # fmt: skip


def measurements(ks: Sequence[int] = (3, 7, 11), concurrencies: Sequence[int] = (1, 8)) -> list[PEagleMeasurement]:
    configs = [*group_configs("chain", ks), *group_configs("tree", ks)]
    return [measurement(one, repeat, count) for repeat in range(3) for count in concurrencies for one in configs]


def peagle_report(ks: Sequence[int] = (3, 7, 11)) -> PEagleReport:
    rows = build_rows("sglang", measurements(ks))
    return PEagleReport(
        draft_time_ratio_k11_over_k3=draft_time_ratio(rows, "peagle"),
        draft_time_ratio_k11_over_k3_eagle3=draft_time_ratio(rows, "eagle3"),
        engine="sglang", engine_version="0.5.23", target="smol", head="smol-eagle3", peagle_head="smol-peagle",
        peagle_trained_levels=None, rows=rows,
        steal=StealCount(limit=0.05, spans=30, over_limit=3, repeated=2, over_limit_share=0.1),
        settings=ServingSettings(threads=2, shapes={}, answer_length=1.0, cache_tokens=4096, busy_percent=1.0),
        versions={"sglang": "0.5.23"}, machine=describe_machine(), date="2026-01-01T00:00:00+00:00",
        measurements=measurements(ks),
    )  # fmt: skip
