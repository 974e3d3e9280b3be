"""Compares the heads of benchmarks/peagle.py: its servers, and its rows, table and picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pydantic import Field
from rich.table import Table

from eagle_plugin.bench.cells import Cell
from eagle_plugin.bench.drawing import (
    GREY,
    PictureError,
    draw_points,
    finish_axes,
    new_figure,
    over_clients,
    save_figure,
)
from eagle_plugin.bench.measurement import Measurement, Results, mean_steal
from eagle_plugin.bench.outputs import Report, StealCount
from eagle_plugin.bench.prompt_kinds import PromptKind
from eagle_plugin.bench.quartiles import Quartiles, Strict
from eagle_plugin.bench.serving.configs import POLICY
from eagle_plugin.bench.serving.report import ServingSettings
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.tables import number, plain_table
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.draft_times import VARIABLE

Kind = Literal["plain", "eagle3", "peagle"]
Form = Literal["chain", "tree"]
FORMS: tuple[Form, ...] = get_args(Form)
TREE_TOPK = 2
SHORT, LONG = 3, 11  # the levels whose drafting times are compared
AIM = 1.3  # below it more levels cost little: draft time of 11 levels over that of 3
NAMES = {"plain": "plain", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
COLOURS: dict[Kind, str] = {"eagle3": "#5b7fa6", "peagle": "#d9662b"}
MARKERS: dict[Kind, str] = {"eagle3": "o", "peagle": "s"}  # in print without colours
LINES = {"chain": "-", "tree": "--"}
COLUMNS = ("clients", "head", "shape", "tokens/s", "accept", "draft ms", "/ plain", "/ EAGLE-3", "MiB", "others")


class Config(NamedTuple):
    """One server: which head it has and the shape of all its rounds."""

    kind: Kind
    form: Form  # of a plain server, that of the servers beside which it is measured
    shape: Shape

    def __str__(self) -> str:
        return f"{self.kind} {self.form if self.kind == 'plain' else self.shape}"

    def measurement(self, fields: dict[str, Any]) -> PEagleMeasurement:
        """What this server did under load."""
        known = fields if self.kind != "plain" else fields | {"accept_length": None}
        return PEagleMeasurement(kind=self.kind, form=self.form, shape=tuple(self.shape), **known)


def shape_of(form: Form, k: int) -> Shape:
    """The shape of k levels: a chain, or a tree with twice the nodes of the chain and two children per node.

    The levels of the tree write 2 (k - 1) draft keys into the 2 k + 1 slots that vLLM reserves for its nodes.
    """
    return Shape.chain(k) if form == "chain" else Shape(k, TREE_TOPK, 2 * (k + 1))


def group_configs(form: Form, ks: Sequence[int]) -> list[Config]:
    """The servers of one form, which are measured interleaved; plain decoding first."""
    kinds: tuple[Kind, ...] = ("eagle3", "peagle")
    return [Config("plain", form, PLAIN), *(Config(kind, form, shape_of(form, k)) for kind in kinds for k in ks)]


def group_specs(plain: ServerSpec, peagle: Path, form: Form, ks: Sequence[int]) -> dict[str, ServerSpec]:
    """The servers of one form by the name of their `Config`; plain has the sizes and the EAGLE-3 head."""
    return {str(config): _spec(plain, peagle, config) for config in group_configs(form, ks)}


def _spec(plain: ServerSpec, peagle: Path, config: Config) -> ServerSpec:
    if config.kind == "plain":
        return replace(plain, mode="plain", name=config.form)
    return replace(
        plain,
        mode="plugin",
        head=peagle if config.kind == "peagle" else plain.head,
        shape=config.shape,
        environment={**plain.environment, POLICY: "fixed", VARIABLE: "1"},
        name=f"{config.kind}-{config.form}-{config.shape.steps}",
    )


class PEagleMeasurement(Measurement):
    """One server under load, once."""

    kind: Kind
    form: Form = Field(description="of a plain server: that of the servers beside which it was measured")
    shape: tuple[int, int, int] = Field(description="steps, topk, draft tokens")

    @property
    def server(self) -> str:
        """The name of its `Config`."""
        return str(Config(self.kind, self.form, Shape(*self.shape)))


class RowSpread(Strict):
    """Quartiles over the repeats; ratios are taken repeat by repeat."""

    tokens_per_s: Quartiles
    draft_ms: Quartiles | None
    ratio_vs_plain: Quartiles | None
    ratio_vs_eagle3: Quartiles | None


class Row(Strict):
    """One server and number of clients: medians over the repeats."""

    engine: str
    kind: Kind
    form: Form = Field(description="of a plain server: that of the servers beside which it was measured")
    k: int = Field(description="levels of a draft; 0 is plain decoding")
    shape: str = Field(description="steps/topk/draft tokens")
    concurrency: int
    prompts: PromptKind
    tokens_per_s: float
    accept_length: float | None = Field(description="with the bonus token; null without speculation")
    draft_ms: float | None = Field(description="milliseconds of the head in a round, by the server")
    ratio_vs_plain: float | None = Field(description="tokens per second")
    ratio_vs_eagle3: float | None = Field(description="tokens per second, P-EAGLE / EAGLE-3 with the same shape")
    memory_mib: float
    steal: float | None = Field(description="mean steal of the measurements")
    others: float = Field(description="the most that other processes used of the machine during one of them")
    repeats: int
    spread: RowSpread


class PEagleReport(Report):
    """`out/peagle.json`."""

    draft_time_ratio_k11_over_k3: float | None = Field(
        description="draft_ms of the P-EAGLE head's chain of 11 over that of 3, at the fewest clients"
    )
    draft_time_ratio_k11_over_k3_eagle3: float | None = Field(description="the same of the EAGLE-3 head")
    target: str
    head: str = Field(description="the EAGLE-3 head")
    peagle_head: str
    peagle_trained_levels: int | None
    rows: list[Row]
    steal: StealCount
    settings: ServingSettings
    measurements: list[PEagleMeasurement]


def build_rows(engine: str, measurements: Sequence[PEagleMeasurement]) -> list[Row]:
    """One row per server and number of clients. ValueError where servers of one group have different repeats."""
    results = Results(measurements)
    return [_row(engine, cell, name, results) for cell in results.cells for name in results.servers(cell)]


def _row(engine: str, cell: Cell, name: str, results: Results[PEagleMeasurement]) -> Row:
    found = results.of(cell, name)
    kind, form, shape = found[0].kind, found[0].form, Shape(*found[0].shape)
    over_plain = results.ratio(cell, name, str(Config("plain", form, PLAIN)))
    over_eagle3 = results.ratio(cell, name, str(Config("eagle3", form, shape))) if kind == "peagle" else None
    rates, drafts = results.quartiles(cell, name, "tokens_per_s"), results.quartiles(cell, name, "draft_ms")
    lengths = results.quartiles(cell, name, "accept_length")
    assert rates is not None
    return Row(
        engine=engine,
        kind=kind,
        form=form,
        k=shape.steps,
        shape=str(shape),
        concurrency=cell.concurrency,
        prompts=cell.prompts,  # type: ignore[arg-type]
        tokens_per_s=round(rates.median, 2),
        accept_length=lengths and lengths.median,
        draft_ms=drafts and drafts.median,
        ratio_vs_plain=over_plain and over_plain.median,
        ratio_vs_eagle3=over_eagle3 and over_eagle3.median,
        memory_mib=max(one.memory_mib for one in found),
        steal=mean_steal(found),
        others=max(one.others for one in found),
        repeats=len(found),
        spread=RowSpread(tokens_per_s=rates, draft_ms=drafts, ratio_vs_plain=over_plain, ratio_vs_eagle3=over_eagle3),
    )


def draft_time_ratio(rows: Sequence[Row], kind: Kind) -> float | None:
    """draft_ms of the chain of 11 over that of 3 at the fewest clients; None unless both were measured."""
    chains = [row for row in rows if row.kind == kind and row.form == "chain" and row.draft_ms]
    first = min(chains, key=lambda row: row.concurrency, default=None)
    like = [row for row in chains if first and (row.concurrency, row.prompts) == (first.concurrency, first.prompts)]
    times = {row.k: row.draft_ms for row in like}
    short, long = times.get(SHORT), times.get(LONG)
    return round(long / short, 3) if short and long else None


def peagle_table(report: PEagleReport) -> Table:
    """One row per server and number of clients."""
    table = plain_table(
        f"{report.target}, {report.engine} {report.engine_version}, bf16: output tokens per second",
        f"medians, ratios repeat by repeat; draft: ms per round of the batch; "
        f"{report.settings.threads} threads on {report.machine.cpu}",
        COLUMNS,
        left=("head", "shape"),
    )
    for row in sorted(report.rows, key=lambda row: row.concurrency):
        shape = f"{row.form}s" if row.kind == "plain" else row.shape  # beside which it was measured
        ratios = map(number, (row.accept_length, row.draft_ms, row.ratio_vs_plain, row.ratio_vs_eagle3))
        named = (str(row.concurrency), NAMES[row.kind], shape)
        table.add_row(*named, number(row.tokens_per_s, 1), *ratios, number(row.memory_mib, 0), f"{row.others:.0%}")
    return table


def summary_lines(report: PEagleReport) -> list[str]:
    """The results in sentences."""
    lines = []
    ours, theirs = report.draft_time_ratio_k11_over_k3, report.draft_time_ratio_k11_over_k3_eagle3
    if ours is None:
        lines.append("the draft time of 11 levels over that of 3 is unknown: measure chains with --ks 3 11")
    else:
        verdict = "below" if ours < AIM else "not below"
        other = "" if theirs is None else f"; EAGLE-3 {theirs:.2f}"
        lines.append(f"draft time of 11 levels over that of 3: P-EAGLE {ours:.2f}, {verdict} {AIM}{other}")
    lines.append(report.steal.sentence())
    busiest = max(row.others for row in report.rows)
    lines.append(f"other processes used at most {busiest:.0%} of the machine during a measurement")
    return lines


def draw_peagle(report: PEagleReport, path: Path) -> None:
    """Write a PNG: on the left draft time at the fewest clients over the levels, on the right ratios over the clients.

    Points are medians, bars reach from the first to the third quartile. The ratios are those of the most levels.
    Raises PictureError.
    """
    drafted = [row for row in report.rows if row.spread.draft_ms]
    if not drafted:
        raise PictureError("no picture: it shows draft times, and no server wrote one")
    fewest, most = min(row.concurrency for row in drafted), max(row.k for row in drafted)
    figure = new_figure(10, 4.6, f"{report.target} in {report.engine} {report.engine_version}")
    times, ratios = figure.subplots(1, 2)
    for kind, colour in COLOURS.items():
        for form in FORMS:
            like = (kind, form, drafted[0].prompts)
            rows = [row for row in drafted if (row.kind, row.form, row.prompts) == like]
            label = f"{NAMES[kind]}, {form}s"
            style = {"color": colour, "marker": MARKERS[kind], "linestyle": LINES[form]}
            by_level = sorted((row for row in rows if row.concurrency == fewest), key=lambda row: row.k)
            deepest = sorted((row for row in rows if row.k == most), key=lambda row: row.concurrency)
            draw_points(times, [(row.k, row.spread.draft_ms) for row in by_level], label, **style)
            points = [(row.concurrency, row.spread.ratio_vs_plain) for row in deepest]
            draw_points(ratios, points, f"{label}, {most} levels", **style)
    times.set_title(f"drafting a round, {fewest} client{'s' if fewest > 1 else ''}", fontsize=11)
    times.set_xlabel("levels")
    times.set_ylabel("milliseconds")
    times.set_xticks(sorted({row.k for row in drafted}))
    times.set_ylim(bottom=0)
    ratios.axhline(1.0, color=GREY, linewidth=1.2)
    counts = sorted({row.concurrency for row in drafted})
    over_clients(ratios, counts, "tokens per second relative to plain decoding")
    for axes in (times, ratios):
        finish_axes(axes)
        axes.legend(fontsize=8, frameon=False)
    caption = f"{report.machine.cores} cores, {report.machine.cpu}; {report.date[:10]}"
    save_figure(figure, path, caption)
