"""What a comparison found: the JSON document, written atomically, and the table for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table

from eagle_plugin.atomic_io import replace_file
from eagle_plugin.bench.machine import Machine
from eagle_plugin.bench.measure import Series, Spread, spread


class Strict(BaseModel):
    """A part of the document in which unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class PlainFigures(Strict):
    """Medians over the repeats of a server that decodes without speculation."""

    tokens_per_s: float = Field(gt=0)
    tpot_ms: float = Field(ge=0)
    ttft_ms: float = Field(ge=0)


class SpeculativeFigures(PlainFigures):
    """The same with the mean accept length, the bonus token included."""

    accept_length: float = Field(ge=1)


class Quartiles(Strict):
    """First quartile, median and third quartile over the repeats."""

    q1: float
    median: float
    q3: float


class SpreadDetail(Strict):
    """How far the repeats of each figure lie apart."""

    plain_tokens_per_s: Quartiles
    builtin_tokens_per_s: Quartiles
    plugin_tokens_per_s: Quartiles
    builtin_speedup_vs_plain: Quartiles
    speedup_vs_plain: Quartiles
    speedup_vs_builtin: Quartiles


class Equality(Strict):
    """Greedy answers of the plugin compared with plain decoding, in fp32, and how often bf16 agrees too."""

    dtype: Literal["float32"] = "float32"
    max_tokens: int
    equal: int
    compared: int
    different: list[str]
    bf16_builtin_equal: int
    bf16_plugin_equal: int
    bf16_compared: int


class Settings(Strict):
    """The flags that the figures depend on."""

    dtype: Literal["bfloat16"] = "bfloat16"
    max_tokens: int
    repeats: int
    prompts_measured: int
    concurrency: Literal[1] = 1
    threads: int
    algorithm: str
    plugin_shape: str = Field(description="steps/topk/draft tokens")
    builtin_shape: str = Field(description="steps/topk/draft tokens")
    plugin_worker: str = Field(description="the plugin's start-up line")
    quick: bool
    busy_percent: float = Field(ge=0, le=100, description="use of all cores by others just before the rounds")


class DemoReport(Strict):
    """`out/demo.json`; the first eleven fields are the contract, the rest is detail."""

    engine: str
    engine_version: str
    target: str
    head: str
    prompts: int = Field(ge=1)
    greedy_equal: bool
    plain: PlainFigures
    builtin: SpeculativeFigures
    plugin: SpeculativeFigures
    speedup_vs_plain: float = Field(gt=0)
    speedup_vs_builtin: float = Field(gt=0)
    equality: Equality
    spread: SpreadDetail
    settings: Settings
    versions: dict[str, str]
    machine: Machine
    date: str


def plain_figures(series: Series) -> PlainFigures:
    """The medians of one server's rounds."""
    return PlainFigures(
        tokens_per_s=round(spread(series.tokens_per_s).median, 2),
        tpot_ms=round(spread(series.tpot_ms).median, 2),
        ttft_ms=round(spread(series.ttft_ms).median, 1),
    )


def speculative_figures(series: Series, label: str) -> SpeculativeFigures:
    """The medians with the accept length; ValueError where the engine reported no verify round."""
    length = series.accept_length
    if length is None:
        raise ValueError(f"{label}: the engine reported no verify round, so its accept length is unknown")
    return SpeculativeFigures(**plain_figures(series).model_dump(), accept_length=round(length, 3))


def quartiles(values: Spread) -> Quartiles:
    """A spread as it goes into the document."""
    return Quartiles(q1=round(values.q1, 3), median=round(values.median, 3), q3=round(values.q3, 3))


def write_json(report: BaseModel, path: Path) -> None:
    """Write the document in one step: readers see the old file or the whole new one, never a half."""
    with replace_file(path) as temporary:
        temporary.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")


def demo_table(report: DemoReport) -> Table:
    """One column each for plain decoding, the engine's own speculation and the plugin's; fits 80 characters."""
    settings, spreads, equality = report.settings, report.spread, report.equality
    table = Table(
        title=f"{report.target}, {report.engine} {report.engine_version}, bf16, one request at a time, greedy",
        caption=(
            f"medians of {settings.repeats} interleaved repeats \\[quartiles], {settings.prompts_measured} questions, "
            f"{settings.threads} threads on {report.machine.cpu}"
        ),
    )
    table.add_column("steps/topk/nodes")
    table.add_column("plain decoding\n-", justify="right")
    table.add_column(f"engine's {settings.algorithm}\n{settings.builtin_shape}", justify="right")
    table.add_column(f"eagle-plugin\n{settings.plugin_shape}", justify="right", style="bold")
    three = (report.plain, report.builtin, report.plugin)
    rates = (spreads.plain_tokens_per_s, spreads.builtin_tokens_per_s, spreads.plugin_tokens_per_s)
    table.add_row("tokens/s", *(f"{one.median:.1f} [{one.q1:.1f}-{one.q3:.1f}]" for one in rates))
    table.add_row("TPOT, ms", *(f"{one.tpot_ms:.1f}" for one in three))
    table.add_row("TTFT, ms", *(f"{one.ttft_ms:.0f}" for one in three))
    table.add_row("accept length", "1", f"{report.builtin.accept_length:.2f}", f"{report.plugin.accept_length:.2f}")
    gains = (spreads.builtin_speedup_vs_plain, spreads.speedup_vs_plain)
    table.add_row("against plain", "1.00x", *(f"{one.median:.2f}x [{one.q1:.2f}-{one.q3:.2f}]" for one in gains))
    ours = spreads.speedup_vs_builtin
    table.add_row("against engine", "", "1.00x", f"{ours.median:.2f}x [{ours.q1:.2f}-{ours.q3:.2f}]")
    table.add_row("same text, fp32", "", "not asked", f"{equality.equal}/{equality.compared}")
    of = equality.bf16_compared
    table.add_row("same text, bf16", "", f"{equality.bf16_builtin_equal}/{of}", f"{equality.bf16_plugin_equal}/{of}")
    return table
