"""The result of the benchmark of P-EAGLE: one row per server and number of clients."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from pydantic import Field

from eagle_plugin.bench.machine import Machine
from eagle_plugin.bench.measure import ratio_spread, spread
from eagle_plugin.bench.peagle.configs import Config, Form, Kind
from eagle_plugin.bench.report import Quartiles, Strict, quartiles
from eagle_plugin.bench.serving.prompts import PromptKind
from eagle_plugin.bench.serving.report import ServingSettings, StealCount
from eagle_plugin.core.shape import Shape

SHORT, LONG = 3, 11  # the levels whose drafting times are compared


class Measurement(Strict):
    """One server under load, once."""

    repeat: int
    concurrency: int
    prompts: PromptKind
    kind: Kind
    form: Form = Field(description="of a plain server: that of the servers beside which it was measured")
    shape: tuple[int, int, int] = Field(description="steps, topk, draft tokens")
    tokens_per_s: float = Field(gt=0)
    seconds: float = Field(gt=0)
    requests: int
    accept_length: float | None
    draft_ms: float | None = Field(description="mean time of the head in a round: reading, and drafting")
    drafted_rounds: int = Field(ge=0, description="rounds that draft_ms is the mean of")
    memory_mib: float = Field(ge=0, description="of the server's processes")
    steal: float | None
    others: float = Field(ge=0, le=1)

    @property
    def config(self) -> Config:
        """The server."""
        return Config(self.kind, self.form, Shape(*self.shape))


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


class PEagleReport(Strict):
    """`out/peagle.json`."""

    draft_time_ratio_k11_over_k3: float | None = Field(
        description="draft_ms of the P-EAGLE head's chain of 11 over that of 3, at the fewest clients"
    )
    draft_time_ratio_k11_over_k3_eagle3: float | None = Field(description="the same of the EAGLE-3 head")
    engine: str
    engine_version: str
    target: str
    head: str = Field(description="the EAGLE-3 head")
    peagle_head: str
    peagle_is_trained: bool = Field(description="if not, only draft_ms and memory_mib say something about P-EAGLE")
    peagle_trained_levels: int | None
    rows: list[Row]
    steal: StealCount
    settings: ServingSettings
    versions: dict[str, str]
    machine: Machine
    date: str
    measurements: list[Measurement]


def build_rows(engine: str, measurements: Sequence[Measurement]) -> list[Row]:
    """One row per server and number of clients, in the order of their first measurement.

    Raises ValueError where servers of one group have different repeats.
    """
    groups: dict[tuple[Config, int, PromptKind], list[Measurement]] = {}
    for one in sorted(measurements, key=lambda one: one.repeat):
        groups.setdefault((one.config, one.concurrency, one.prompts), []).append(one)
    order = dict.fromkeys((one.config, one.concurrency, one.prompts) for one in measurements)
    return [_row(engine, key, groups) for key in order]


def _row(
    engine: str,
    key: tuple[Config, int, PromptKind],
    groups: Mapping[tuple[Config, int, PromptKind], Sequence[Measurement]],
) -> Row:
    config, *cell = key
    found = groups[key]
    rates = [one.tokens_per_s for one in found]
    drafts = _known(found, lambda one: one.draft_ms)
    lengths = _known(found, lambda one: one.accept_length)
    steals = _known(found, lambda one: one.steal)

    def ratio_to(kind: Kind) -> Quartiles | None:
        other = next(
            (
                values
                for (theirs, *where), values in groups.items()
                if (theirs.kind, theirs.form, where) == (kind, config.form, cell)
                and (kind == "plain" or theirs.shape == config.shape)
            ),
            None,
        )
        if other is None or kind == config.kind or config.kind == "plain":
            return None
        if [one.repeat for one in other] != [one.repeat for one in found]:
            raise ValueError(f"{config} and {kind} have different repeats at {cell[0]} clients; run with --resume")
        return quartiles(ratio_spread(rates, [one.tokens_per_s for one in other]))

    over_plain = ratio_to("plain")
    over_eagle3 = ratio_to("eagle3") if config.kind == "peagle" else None
    return Row(
        engine=engine,
        kind=config.kind,
        form=config.form,
        k=config.k,
        shape=str(config.shape),
        concurrency=found[0].concurrency,
        prompts=found[0].prompts,
        tokens_per_s=round(spread(rates).median, 2),
        accept_length=round(spread(lengths).median, 3) if lengths else None,
        draft_ms=round(spread(drafts).median, 3) if drafts else None,
        ratio_vs_plain=over_plain.median if over_plain else None,
        ratio_vs_eagle3=over_eagle3.median if over_eagle3 else None,
        memory_mib=round(max(one.memory_mib for one in found), 1),
        steal=round(statistics.mean(steals), 4) if steals else None,
        others=max(one.others for one in found),
        repeats=len(found),
        spread=RowSpread(
            tokens_per_s=quartiles(spread(rates)),
            draft_ms=quartiles(spread(drafts)) if drafts else None,
            ratio_vs_plain=over_plain,
            ratio_vs_eagle3=over_eagle3,
        ),
    )


def _known(found: Sequence[Measurement], value: Callable[[Measurement], float | None]) -> list[float]:
    return [number for number in map(value, found) if number is not None]


def draft_time_ratio(rows: Sequence[Row], kind: Kind) -> float | None:
    """draft_ms of the chain of 11 over that of 3 at the fewest clients; None unless both were measured."""
    chains = [row for row in rows if row.kind == kind and row.form == "chain" and row.draft_ms]
    first = min(chains, key=lambda row: row.concurrency, default=None)
    like = [row for row in chains if first and (row.concurrency, row.prompts) == (first.concurrency, first.prompts)]
    times = {row.k: row.draft_ms for row in like}
    short, long = times.get(SHORT), times.get(LONG)
    return round(long / short, 3) if short and long else None
