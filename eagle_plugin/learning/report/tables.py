"""The tables of a report as plain strings, the same for HTML and for Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from eagle_plugin.bench.quartiles import Quartiles
from eagle_plugin.bench.states.configs import NAMES, State
from eagle_plugin.bench.states.document import Comparison, HeadFacts, Row, StatesReport, count_repeats
from eagle_plugin.bench.states.verdict import Finding, Ratio
from eagle_plugin.common.learnt import COLUMNS as SOURCE_COLUMNS
from eagle_plugin.common.learnt import source_rows
from eagle_plugin.learning.report.inputs import Evaluation

COLUMNS = (
    "Configuration",
    "Concurrency",
    "TTFT (ms)",
    "TPOT (ms)",
    "ITL (ms)",
    "Request throughput (1/s)",
    "Output throughput (tokens/s)",
    "OTPS per request",
    "Accept length",
)
FINDINGS: dict[Finding, str] = {
    "more": "more",
    "fewer": "fewer",
    "no difference": "no difference that this can show",
    "unknown": "not known from one repeat",
}
BUSY = 0.1  # part of the machine


class Table(NamedTuple):
    """A table; the first column names the row."""

    caption: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def load_tables(states: StatesReport) -> list[Table]:
    """One table per set of prompts: medians and quartiles over the repeats."""
    tables: dict[str, Table] = {}
    for row in sorted(states.rows, key=lambda row: row.concurrency):
        caption = f"{row.prompts} prompts: median (quartiles) over {count_repeats(row.repeats)}"
        tables.setdefault(row.prompts, Table(caption, COLUMNS, [])).rows.append(_load_row(row))
    return [tables[name] for name in dict.fromkeys(row.prompts for row in states.rows)]


def _load_row(row: Row) -> tuple[str, ...]:
    return (
        NAMES[row.state],
        str(row.concurrency),
        _spread(row.ttft_ms, 0),
        _spread(row.tpot_ms, 1),
        _spread(row.itl_ms, 1),
        _spread(row.requests_per_s, 2),
        _spread(row.tokens_per_s, 1),
        _spread(row.otps, 1),
        _spread(row.accept_length, 2),
    )


def aiperf_tables(states: StatesReport) -> list[Table]:
    """What aiperf measured, in the columns of `load_tables`; none where it was not asked."""
    tables: dict[str, Table] = {}
    for row in states.aiperf:
        caption = f"{row.prompts} prompts by aiperf, once"
        values = (row.ttft_ms, row.tpot_ms, row.itl_ms, row.requests_per_s, row.tokens_per_s, row.otps)
        shown = (f"{value:.{digits}f}" for value, digits in zip(values, (0, 1, 1, 2, 1, 1), strict=True))
        own = tables.setdefault(row.prompts, Table(caption, COLUMNS[:-1], []))
        own.rows.append((NAMES[row.state], str(row.concurrency), *shown))
    return list(tables.values())


def _spread(values: Quartiles | None, digits: int) -> str:
    if values is None:
        return "–"
    return f"{values.median:.{digits}f} ({values.q1:.{digits}f}–{values.q3:.{digits}f})"


def ratio_table(states: StatesReport) -> Table:
    """The trained head relative to the other states, over all cells and cell by cell."""
    columns = ("Compared with", "Prompts", "Concurrency", "Ratio (95 % interval)", "Shown")
    return Table("Output tokens per second of the trained head", columns, [_ratio_row(c) for c in states.comparisons])


def _ratio_row(one: Comparison) -> tuple[str, ...]:
    where = (one.prompts or "all", str(one.concurrency or "all"))
    return (NAMES[one.theirs], *where, str(Ratio(one.ratio, one.low, one.high)), FINDINGS[one.finding])


def evaluation_tables(evaluation: Evaluation | None) -> list[Table]:
    """The accept lengths that `eagle-plugin eval` measured without an engine."""
    if not evaluation:
        return []
    ways = list(dict.fromkeys(way for found in evaluation.values() for stats in found.values() for way in stats))
    rows = [
        (head, domain, *(_length(stats.get(way)) for way in ways))
        for head, domains in evaluation.items()
        for domain, stats in domains.items()
    ]
    return [Table("Accept length (95 % interval), without an engine", ("Head", "Domain", *ways), rows)]


def _length(stats: Any) -> str:
    return "–" if stats is None else f"{stats.accept_length:.2f} ({stats.low:.2f}–{stats.high:.2f})"


def repeat_tables(states: StatesReport) -> Iterator[Table]:
    """What a repetition needs: versions, settings, machine, and the digests of all that was measured."""
    settings, machine = states.settings, states.machine
    yield Table("Versions", ("Package", "Version"), list(states.versions.items()))
    yield Table(
        "Settings and machine",
        ("What", "Value"),
        [
            ("engine", f"{states.engine} {states.engine_version}"),
            ("who serves the heads", settings.worker),
            (
                "trees (steps/topk/draft tokens)",
                _join({NAMES[s]: settings.shapes[s] for s in NAMES if s in settings.shapes}),
            ),
            ("dtype, device, threads", f"{settings.dtype}, {settings.device}, {settings.threads}"),
            ("temperature", f"{settings.temperature:g}"),
            ("mean limit of an answer", f"{settings.max_tokens} tokens"),
            ("processor", f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB"),
            ("instruction sets", ", ".join(machine.instruction_sets) or "–"),
            ("system, Python", f"{machine.system}, {machine.python}"),
            ("measured", states.date),
        ],
    )
    yield Table("Digests (sha256)", ("What", "Digest"), list(_digests(states)))


def _digests(states: StatesReport) -> Iterator[tuple[str, str]]:
    target = states.target
    for name, digest in target.items():
        if name != "name":
            yield f"target {target.get('name', '')}, {name.removesuffix('_sha256')}", digest
    for state, head in states.heads.items():
        yield f"{NAMES[state]} {head.name}, weights", head.weights_sha256
        yield f"{NAMES[state]} {head.name}, config", head.config_sha256
    for name, found in states.prompts.items():
        yield f"prompts {name}, {found.questions} of them{_left_out(found.left_out)}", found.sha256


def _left_out(reasons: dict[str, int]) -> str:
    return "".join(f", {count} {reason} left out" for reason, count in reasons.items())


def training_table(heads: dict[State, HeadFacts]) -> Table | None:
    """How the heads were trained, as their manifests say; None where none of them says it."""
    facts = {state: _training(head) for state, head in heads.items() if head.training}
    names = list(dict.fromkeys(name for found in facts.values() for name in found))
    if not names:
        return None
    rows = [(name, *(found.get(name, "–") for found in facts.values())) for name in names]
    return Table("Training, from the heads' manifests", ("What", *(NAMES[state] for state in facts)), rows)


def source_tables(heads: dict[State, HeadFacts]) -> list[Table]:
    """What each head learnt from, with the licences; none of heads whose manifests do not say it."""
    found = []
    for state, head in heads.items():
        if rows := source_rows(head.training):
            target = (head.training or {}).get("target_license")
            found.append(Table(f"Sources of {NAMES[state]} (licence of the target: {target})", SOURCE_COLUMNS, rows))
    return found


def _training(head: HeadFacts) -> dict[str, str]:
    training = head.training or {}
    recipe = training.get("recipe")
    recipe = recipe if isinstance(recipe, dict) else {}
    facts = {"head": head.name, "kind": head.kind or "–"}
    facts |= {name: f"{training[name]:,}" for name in ("tokens", "updates", "epochs") if _number(training.get(name))}
    for name in ("batch_tokens", "dtype", "seed"):
        if isinstance(recipe.get(name), str | int):
            facts[name] = str(recipe[name])
    for part, name in (("optimiser", "name"), ("optimiser", "lr"), ("loss", "name")):
        value = recipe[part].get(name) if isinstance(recipe.get(part), dict) else None
        if isinstance(value, str | int | float):
            facts[f"{part}, {name}"] = str(value)
    if isinstance(digest := training.get("documents_sha256"), str):
        facts["documents (sha256)"] = digest
    return facts


def _number(value: object) -> bool:
    return isinstance(value, int | float)


def cautions(states: StatesReport) -> list[str]:
    """What makes this measurement less certain than its intervals say."""
    found = []
    busiest = max(one.others for one in states.measurements)
    if busiest > BUSY:
        found.append(f"Other processes used up to {busiest:.0%} of the machine during a measurement.")
    if states.steal.over_limit:
        found.append(
            f"In {states.steal.over_limit} of {states.steal.spans} measured spans the host gave more than "
            f"{states.steal.limit:.0%} of the processor time that was wanted to others; {states.steal.repeated} spans "
            "were measured again."
        )
    repeats = min(row.repeats for row in states.rows)
    if repeats < 3:
        found.append(f"Only {count_repeats(repeats)}: an interval over so few is wide or missing.")
    return found


def _join(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "–"
