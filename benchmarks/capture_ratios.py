"""The document of benchmarks/capture_cost.py, and the ratios in it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from eagle_plugin.bench.machine import Machine
from eagle_plugin.bench.measure import spread
from eagle_plugin.bench.report import Quartiles, Strict, quartiles

State = Literal["off", "twin", "opt_out", "on"]


class Measurement(Strict):
    """One server under load, once."""

    repeat: int
    state: State = Field(
        description="off and twin: servers without a capture; opt_out and on: the server with it, without and with "
        "records of the requests"
    )
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

    ratio: float = Field(description="tokens/s with records over those of the same server without them: the median")
    quartiles: Quartiles
    limit: float
    passed: bool
    tpot_ratio: Quartiles
    cpu_ratio: Quartiles = Field(description="cpu_ms_per_token without records over that with them")
    twin_ratio: Quartiles = Field(description="tokens/s of one server without a capture over the other one")
    twin_cpu_ratio: Quartiles
    other_server_ratio: Quartiles = Field(
        description="tokens/s with records over the mean of the two servers without a capture"
    )
    other_server_cpu_ratio: Quartiles
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
    measurements: Sequence[Measurement],
    field: Literal["tokens_per_s", "tpot_ms", "cpu_ms_per_token"],
    above: State = "on",
    below: tuple[State, ...] = ("opt_out",),
) -> list[float]:
    """One state over the mean of others, one ratio per repeat."""
    values = {(one.repeat, one.state): float(getattr(one, field)) for one in measurements}
    repeats = sorted({one.repeat for one in measurements})
    return [values[i, above] / statistics.fmean(values[i, state] for state in below) for i in repeats]


def spreads(
    measurements: Sequence[Measurement], field: Literal["tokens_per_s", "cpu_ms_per_token"]
) -> list[Quartiles]:
    """Ratios, above 1 where the first is faster: on over opt_out, twin over off, on over the mean of off and twin."""
    compared: tuple[tuple[State, tuple[State, ...]], ...]
    compared = (("on", ("opt_out",)), ("twin", ("off",)), ("on", ("off", "twin")))
    sign = -1 if field == "cpu_ms_per_token" else 1
    return [quartiles(spread([x**sign for x in ratios(measurements, field, *pair)])) for pair in compared]
