"""Describes the result of the demo as a document."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eagle_plugin.bench.machine import Machine
from eagle_plugin.bench.measure import RepeatSeries
from eagle_plugin.bench.quartiles import Quartiles, Strict, quartiles


class PlainStats(Strict):
    """Medians over the repeats, of a server without speculation."""

    tokens_per_s: float = Field(gt=0)
    tpot_ms: float = Field(ge=0)
    ttft_ms: float = Field(ge=0)


class SpeculativeStats(PlainStats):
    """The same of a server with speculation, with its mean accept length, the bonus token included."""

    accept_length: float = Field(ge=1)


class SpreadDetail(Strict):
    """How much the repeats of each result differ."""

    plain_tokens_per_s: Quartiles
    builtin_tokens_per_s: Quartiles
    plugin_tokens_per_s: Quartiles
    builtin_speedup_vs_plain: Quartiles
    speedup_vs_plain: Quartiles
    speedup_vs_builtin: Quartiles


class Equality(Strict):
    """How many greedy answers of the plugin equal those of plain decoding: in fp32, and for comparison in bf16.

    Of fp32, `compared` counts the answers that had any token to compare; `empty` names the others. `not_compared` says
    why nothing was asked in fp32, if that is so; then `compared` is 0.
    """

    dtype: Literal["float32"] = "float32"
    max_tokens: int
    equal: int
    compared: int
    different: list[str]
    empty: list[str] = []
    not_compared: str = ""
    bf16_builtin_equal: int
    bf16_plugin_equal: int
    bf16_compared: int


class DemoSettings(Strict):
    """What the results depend on."""

    dtype: Literal["bfloat16"] = "bfloat16"
    max_tokens: int
    repeats: int = Field(ge=1, description="how many were made")
    max_repeats: int = Field(ge=1)
    stop_reason: str = Field(description="why there were not more repeats")
    prompts_measured: int
    concurrency: Literal[1] = 1
    device: str = "cpu"
    threads: int
    algorithm: str
    plugin_shape: str = Field(description="steps/topk/draft tokens")
    builtin_shape: str = Field(description="steps/topk/draft tokens")
    plugin_worker: str = Field(description="the line of the start-up log in which the plugin tells what it serves")
    quick: bool
    thorough: bool
    busy_percent: float = Field(
        ge=0, le=100, description="use of all cores by other processes just before the first repeat"
    )
    over_steal_limit: float | None = Field(
        default=None,
        description="part of the measured spans in which more than 5 % of the processor time that was wanted went to "
        "other guests of the host; such spans were measured again; null if unknown",
    )


class ShownAnswer(Strict):
    """An answer as it arrived from a server that ran alone."""

    title: str = Field(description="who answered")
    speed: str
    pieces: list[tuple[float, str]] = Field(min_length=1, description="seconds after the request, and the text")


class ShownQuestion(Strict):
    """A question that the demo showed, with the answers side by side."""

    prompt: str
    answers: list[ShownAnswer]


class DemoReport(Strict):
    """`out/demo.json`; the first eleven fields never change their names, the others are details."""

    engine: str
    engine_version: str
    target: str
    head: str
    prompts: int = Field(ge=1)
    greedy_equal: bool
    plain: PlainStats
    builtin: SpeculativeStats
    plugin: SpeculativeStats
    speedup_vs_plain: float = Field(gt=0)
    speedup_vs_builtin: float = Field(gt=0)
    equality: Equality
    spread: SpreadDetail
    settings: DemoSettings
    shown: list[ShownQuestion] = []
    versions: dict[str, str]
    machine: Machine
    date: str


def plain_stats(series: RepeatSeries) -> PlainStats:
    """The medians of one server's repeats."""
    return PlainStats(
        tokens_per_s=quartiles(series.tokens_per_s, 2).median,
        tpot_ms=quartiles(series.tpot_ms, 2).median,
        ttft_ms=quartiles(series.ttft_ms, 1).median,
    )


def speculative_stats(series: RepeatSeries, label: str) -> SpeculativeStats:
    """The medians with the accept length; ValueError if the engine reported no verify round."""
    length = series.accept_length
    if length is None:
        raise ValueError(f"{label}: the engine reported no verify round, so its accept length is unknown")
    return SpeculativeStats(**plain_stats(series).model_dump(), accept_length=round(length, 3))
