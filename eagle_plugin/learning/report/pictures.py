"""The pictures of a report: times over concurrency, the learning curve, acceptance, calibration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from eagle_plugin.bench.quartiles import Quartiles
from eagle_plugin.bench.states.configs import NAMES, STATES, State
from eagle_plugin.bench.states.document import Row, StatesReport, accepted_by_depth
from eagle_plugin.learning.report.inputs import Curve, Evaluation
from eagle_plugin.learning.report.svg import Picture, draw, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEPTHS = 7  # series with a look of their own
TREE = "tree16_t0"  # the way of drafting of `eagle-plugin eval` that is nearest to what a server does


def draw_load(states: StatesReport) -> Iterator[Picture]:
    """Median TPOT and output throughput over concurrency, two pictures per set of prompts."""
    for number, prompts in enumerate(dict.fromkeys(row.prompts for row in states.rows)):
        rows = [row for row in states.rows if row.prompts == prompts]
        for name, label, value in (
            ("tpot", "TPOT, ms (lower is better)", lambda row: row.tpot_ms),
            ("rate", "Output throughput, tokens/s (higher is better)", lambda row: row.tokens_per_s),
        ):
            title = f"{label}: {prompts} prompts"
            yield _over_concurrency(f"{name}-{number}", title, label, rows, value)


def _over_concurrency(
    name: str, title: str, label: str, rows: Sequence[Row], value: Callable[[Row], Quartiles | None]
) -> Picture:
    series: dict[State, list[tuple[int, Quartiles]]] = {}
    for row in sorted(rows, key=lambda row: row.concurrency):
        if (found := value(row)) is not None:
            series.setdefault(row.state, []).append((row.concurrency, found))
    counts = sorted({row.concurrency for row in rows})

    def plot(axes: Axes) -> None:
        for place, (state, points) in enumerate(series.items()):
            clients = [count * 1.03 ** (place - 1) for count, _ in points]  # beside each other
            medians = [found.median for _, found in points]
            spread = [
                [found.median - found.q1 for _, found in points],
                [found.q3 - found.median for _, found in points],
            ]
            axes.errorbar(clients, medians, yerr=spread, capsize=3, label=NAMES[state], **style(STATES.index(state)))
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(counts) / 1.3, max(counts) * 1.3)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set(xlabel="concurrency", ylabel=label.split(" (")[0])

    told = "; ".join(
        f"{NAMES[state]} " + ", ".join(f"{found.median:.4g} at {clients}" for clients, found in points)
        for state, points in series.items()
    )
    return draw(name, title, f"{label}, by the number of clients: {told}.", plot)


def draw_acceptance(states: StatesReport) -> Iterator[Picture]:
    """The part of the rounds that accept 1, 2, ... drafts or more, and the accept length of each set of prompts."""
    depths = {
        state: accepted_by_depth([one for one in states.measurements if one.state == state])
        for state in STATES
        if state != "none"
    }
    shown = {state: values for state, values in depths.items() if values}
    if not shown:
        return

    def by_depth(axes: Axes) -> None:
        for state, values in shown.items():
            axes.plot(range(1, len(values) + 1), values, label=NAMES[state], **style(STATES.index(state)))
        axes.set_xticks(range(1, max(map(len, shown.values())) + 1))
        axes.set(xlabel="drafts accepted, at least", ylabel="part of the rounds", ylim=(0, 1))

    told = "; ".join(
        f"{NAMES[state]} " + ", ".join(f"{value:.0%} at depth {k}" for k, value in enumerate(values, 1))
        for state, values in shown.items()
    )
    yield draw("depth", "Acceptance by depth", f"Part of the rounds that accept each depth: {told}.", by_depth)

    sets = list(dict.fromkeys(row.prompts for row in states.rows))
    lengths = {
        NAMES[state]: {
            prompts: _middle([row.accept_length for row in states.rows if (row.state, row.prompts) == (state, prompts)])
            for prompts in sets
        }
        for state in shown
    }
    places = {NAMES[state]: STATES.index(state) for state in shown}
    yield _by_domain("domain", "Accept length by set of prompts, in the server", lengths, places)


def _middle(found: Sequence[Quartiles | None]) -> tuple[float, float, float] | None:
    """The mean over the numbers of clients of the medians and of both quartiles."""
    known = [one for one in found if one is not None]
    if not known:
        return None
    return tuple(sum(values) / len(known) for values in zip(*((q.median, q.q1, q.q3) for q in known), strict=True))  # type: ignore[return-value]


def draw_evaluation(evaluation: Evaluation) -> Iterator[Picture]:
    """The accept length of each head by domain, as `eagle-plugin eval` measured it."""
    lengths = {
        head: {
            domain: (stats[TREE].accept_length, stats[TREE].low, stats[TREE].high) if TREE in stats else None
            for domain, stats in domains.items()
        }
        for head, domains in evaluation.items()
    }
    if any(found for domains in lengths.values() for found in domains.values()):
        # One head is the trained one; of two the first is the base.
        places = {head: 2 if number == len(lengths) - 1 else 1 + 2 * number for number, head in enumerate(lengths)}
        yield _by_domain("eval", "Accept length by domain, without an engine", lengths, places)


def _by_domain(
    name: str, title: str, lengths: dict[str, dict[str, tuple[float, float, float] | None]], places: dict[str, int]
) -> Picture:
    """Points with intervals: series -> domain -> (middle, low, high)."""
    domains = list(dict.fromkeys(domain for found in lengths.values() for domain in found))

    def plot(axes: Axes) -> None:
        for number, (series, found) in enumerate(lengths.items()):
            shift = 0.12 * (number - (len(lengths) - 1) / 2)
            points = [(domains.index(domain) + shift, *values) for domain, values in found.items() if values]
            if points:
                look = style(places[series]) | {"linestyle": "none"}
                bars = [
                    [middle - low for _, middle, low, _ in points],
                    [high - middle for _, middle, _, high in points],
                ]
                where = [place for place, *_ in points]
                axes.errorbar(where, [point[1] for point in points], yerr=bars, capsize=3, label=_short(series), **look)
        axes.set_xticks(range(len(domains)), [_short(domain, 14) for domain in domains], rotation=20)
        axes.set_xlim(-0.5, len(domains) - 0.5)
        axes.set_ylabel("tokens per round")
        highest = max((values[2] for found in lengths.values() for values in found.values() if values), default=1.0)
        axes.set_ylim(1, 1 + 1.1 * (highest - 1) + 0.05)

    told = "; ".join(
        f"{series} " + ", ".join(f"{values[0]:.2f} on {domain}" for domain, values in found.items() if values)
        for series, found in lengths.items()
    )
    return draw(name, title, f"{title}, the bonus token included: {told}.", plot)


def draw_curve(curve: Curve) -> Iterator[Picture]:
    """Held-out loss, and acceptance by depth, over the tokens of the training."""
    losses = [(point.tokens, point.total_loss) for point in curve.held_out if point.total_loss is not None]
    if losses:
        told = f"The held-out loss goes from {losses[0][1]:.3g} to {losses[-1][1]:.3g} in {losses[-1][0]:,.0f} tokens."
        yield draw("loss", "Held-out loss", told, lambda axes: _over_tokens(axes, {"": losses}, "loss"))
    depths = max((len(point.acceptance) for point in curve.held_out), default=0)
    if depths:
        series = {
            f"depth {k + 1}": [(one.tokens, one.acceptance[k]) for one in curve.held_out if k < len(one.acceptance)]
            for k in range(min(depths, DEPTHS))
        }
        told = "; ".join(f"{name} from {points[0][1]:.0%} to {points[-1][1]:.0%}" for name, points in series.items())
        told = f"Held-out acceptance, given that all drafts before were accepted: {told}."
        yield draw(
            "curve", "Held-out acceptance by depth", told, lambda axes: _over_tokens(axes, series, "accepted", 1)
        )


def _over_tokens(axes: Axes, series: dict[str, Any], label: str, top: float | None = None) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    for place, (name, points) in enumerate(series.items()):
        axes.plot(*zip(*points, strict=True), label=name, **style(place if name else 2) | {"markersize": 4})
    axes.set(xlabel="training tokens", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if top is not None:
        axes.set_ylim(0, top)


def draw_calibration(states: StatesReport) -> Iterator[Picture]:
    """Accepted over predicted tokens by depth, as the plugin's policy has learned it."""
    found = {state: factors for state, factors in states.calibration.items() if factors}
    if not found:
        return

    def plot(axes: Axes) -> None:
        axes.axhline(1, color="#777777", linewidth=1)
        for state, factors in found.items():
            axes.plot(range(1, len(factors) + 1), factors, label=NAMES[state], **style(STATES.index(state)))
        axes.set_xticks(range(1, max(map(len, found.values())) + 1))
        highest = max(max(factors) for factors in found.values())
        axes.set(xlabel="depth", ylabel="accepted / predicted", ylim=(0, 1.1 * max(1.0, highest)))

    told = "; ".join(
        f"{NAMES[state]} " + ", ".join(f"{factor:.2f} at depth {k}" for k, factor in enumerate(factors, 1))
        for state, factors in found.items()
    )
    told = f"Accepted over predicted tokens, below 1 the head is too sure of itself: {told}."
    yield draw("calibration", "Calibration by depth", told, plot)


def _short(text: str, length: int = 24) -> str:
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= length else text[: length - 1] + "…"
