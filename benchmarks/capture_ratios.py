"""The document of benchmarks/capture_cost.py, and the ratios in it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from eagle_plugin.bench.machine import Machine
from eagle_plugin.bench.quartiles import Quartiles, Strict

State = Literal["off", "on"]


class Measurement(Strict):
    """One server under load, once."""

    repeat: int
    place: int = Field(description="within the repeat, from 0 on")
    state: State = Field(description="whether the requests are recorded")
    tokens_per_s: float
    cpu_ms_per_token: float = Field(
        description="processor time of the server's processes; the writer is not one of them"
    )
    tpot_ms: float
    ttft_ms: float
    tokens: int
    requests: int
    seconds: float
    others: float = Field(description="part of the machine that other processes used; the writer is one of them")
    steal: float | None = Field(description="part of the wanted processor time that the host gave to others")
    left_seconds: float = Field(description="until the writer had written what was left after the load")


class CaptureCost(Strict):
    """`out/capture_cost.json`."""

    ratio: float = Field(description="tokens/s with records over those without: the median")
    quartiles: Quartiles
    limit: float
    passed: bool
    tpot_ratio: Quartiles
    cpu_ratio: Quartiles = Field(description="cpu_ms_per_token without records over that with them")
    same_state_ratio: Quartiles = Field(
        description="tokens/s of the later measurement of a state over the earlier one in the same repeat"
    )
    quick: bool
    engine: str
    target: str
    head: str
    clients: int
    repeats: int
    requests: int = Field(description="of each measurement")
    max_tokens: int = Field(description="mean limit of an answer")
    threads: int
    records: int = Field(description="answers that were written")
    bytes_per_record: int
    filtered: int = Field(description="answers with private data, which are not written")
    dropped: dict[str, int]
    busy_percent: float
    over_steal_limit: float | None = Field(description="part of the measurements with too much steal")
    versions: dict[str, str]
    machine: Machine
    date: str
    measurements: list[Measurement]


def ratios(
    measurements: Sequence[Measurement], field: Literal["tokens_per_s", "tpot_ms", "cpu_ms_per_token"]
) -> list[float]:
    """With records over without, each the mean of a repeat's measurements; one ratio per repeat."""
    values: dict[tuple[int, str], list[float]] = {}
    for one in measurements:
        values.setdefault((one.repeat, one.state), []).append(float(getattr(one, field)))
    repeats = sorted({one.repeat for one in measurements})
    return [statistics.fmean(values[i, "on"]) / statistics.fmean(values[i, "off"]) for i in repeats]


def same_state_ratios(measurements: Sequence[Measurement]) -> list[float]:
    """Tokens/s of the later measurement of a state over the earlier one, two ratios per repeat: what chance does."""
    found: dict[tuple[int, str], list[float]] = {}
    for one in sorted(measurements, key=lambda one: one.place):
        found.setdefault((one.repeat, one.state), []).append(one.tokens_per_s)
    return [later / earlier for earlier, later in found.values()]
