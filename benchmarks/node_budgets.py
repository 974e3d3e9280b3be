"""Would a batch yield more if its nodes went to the requests whose drafts are likely, instead of to all alike?

    python benchmarks/node_budgets.py [--json out/node-budgets.json]
    python benchmarks/node_budgets.py --record out/sampled.npz --temperature 0.7    # with models, on this machine's CPU

All requests of a round get trees of W nodes today. Here they are compared with trees that have W nodes on average: of
all candidates of the batch the best by path score, and a root for each request. Rounds are recorded ones of the shipped
head and its target (benchmarks/traces: greedy, and at temperature 0.7 by the product's rule), and of a synthetic head
with the accept length of a published one. A batch is b random rounds.

First table: expected tokens per round with W nodes on average, for the best levels and children of each way. Second:
expected tokens per second with the best plan (levels/children/W) of each way, plain decoding included, against the best
plan of equal trees. Costs: the tables that servers measured on this machine (if there are any in EAGLE_CACHE_DIR), and
a SIMULATED H100 with Llama-3.1-8B. Ways:

    by request           rows are counted exactly, as vLLM can; chosen by path score, raw or calibrated
    at most 2 W          the same, but no tree has more than twice the mean
    padded               every tree has the rows of the batch's largest one, as in SGLang
    oracle               chosen by what the target will accept: a bound that nothing reaches
    walked               raw, and rounds begin where the last ones ended, instead of anywhere (greedy rounds only)

After +-: the standard error over another choice of responses.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import node_budgets_compare as ways
from benchmarks.node_budgets_compare import RAW, SAME, WAYS, Measured, measure, rank, walk
from benchmarks.node_budgets_costs import SIMULATED, measured_costs, simulated_costs
from benchmarks.node_budgets_record import record
from benchmarks.node_budgets_rounds import Ranked, Rounds
from benchmarks.simulate_published import synthetic_trace
from benchmarks.simulate_traces import Trace
from eagle_plugin.bench.choices import TARGET
from eagle_plugin.bench.report import write_json
from eagle_plugin.common.command_end import end_of
from eagle_plugin.common.errors import UserError
from eagle_plugin.policy.costs import Costs

TRACES = Path(__file__).with_name("traces")
GREEDY_TRACE, SAMPLED_TRACE = TRACES / "smollm2-135m.npz", TRACES / "smollm2-135m-sampled.npz"
REQUESTS = (2, 4, 8, 16, 32, 64, 128, 256)
SHOWN_WIDTHS = (2, 3, 4, 6, 8)
ALL_BUT_SAME = tuple(way for way in WAYS if way != SAME)
WITH_EXACT_ROWS = (ways.SAME_CALIBRATED, RAW, ways.CALIBRATED, ways.CAPPED, ways.ORACLE)


class Row(BaseModel):
    """One number of requests, one source of rounds, one table of costs."""

    model_config = ConfigDict(extra="forbid")

    rounds: str
    costs: str
    requests: int
    tokens_per_second: dict[str, float]  # by way, of its best plan
    plans: dict[str, str]  # the same, levels/children/mean nodes
    gains: dict[str, tuple[float, float]]  # by way: over the best plan of equal trees, standard error
    walked_gain: float | None  # of RAW; None where rounds are not at every position


class Accepted(BaseModel):
    """Expected tokens per request and round, with the bonus token, at one mean number of nodes."""

    model_config = ConfigDict(extra="forbid")

    rounds: str
    requests: int
    width: float
    tokens: dict[str, float]  # by way
    more: dict[str, tuple[float, float]]  # by way: over equal trees, standard error


class Report(BaseModel):
    """The document that is written."""

    model_config = ConfigDict(extra="forbid")

    context: int
    samples: int
    rounds_per_sample: int
    tables: dict[str, Costs]
    accepted: list[Accepted]
    rows: list[Row]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", nargs="+", type=int, default=REQUESTS, help="requests of a batch")
    parser.add_argument("--context", type=int, default=1000, help="tokens of each request's prefix")
    parser.add_argument("--samples", type=int, default=16, help="bootstrap samples of the responses")
    parser.add_argument("--rounds", type=int, default=1024, help="rounds per sample; at least 16 batches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("out/node-budgets.json"))
    parser.add_argument("--record", type=Path, help="record rounds into this file, and end")
    parser.add_argument("--temperature", type=float, default=0.7, help="of --record")
    parser.add_argument("--prompts", type=int, default=24, help="of --record")
    parser.add_argument("--tokens", type=int, default=64, help="of --record, per prompt")
    options = parser.parse_args(arguments)
    for name, least in (("requests", 1), ("context", 1), ("samples", 2), ("rounds", 1), ("prompts", 1), ("tokens", 2)):
        value = getattr(options, name)
        if min(value if isinstance(value, (list, tuple)) else [value]) < least:
            parser.error(f"--{name} is {value}, wanted at least {least}")
    return options


def load_rounds() -> dict[str, Rounds]:
    """The rounds to compare on, by what they are."""
    try:
        greedy, sampled = Rounds.of_trace(Trace.load(GREEDY_TRACE)), Rounds.load(SAMPLED_TRACE)
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"the recorded rounds in {TRACES} cannot be read ({error}): check them out again") from error
    synthetic = Rounds.of_trace(synthetic_trace("Llama-3.1-8B"))
    return {"recorded, T = 0": greedy, "recorded, T = 0.7": sampled, "synthetic, T = 0": synthetic}


def load_costs(console: Console) -> dict[str, Costs]:
    """The tables of costs by name; those of this machine where a server with a policy has run."""
    costs = {SIMULATED: simulated_costs()}
    for engine in ("vllm", "sglang"):
        found = measured_costs(engine, TARGET)
        if found is None:
            console.print(f"no costs of {engine} with {TARGET} in bf16: start a server with EAGLE_POLICY=auto once")
        else:
            costs[found[0]] = found[1]
    return costs


def accepted_rows(name: str, b: int, measured: Measured) -> list[Accepted]:
    return [
        Accepted(
            rounds=name,
            requests=b,
            width=width,
            tokens={way: 1 + float(measured.accepted_at(way, width).mean()) for way in WAYS},
            more={way: measured.more_accepted(way, width) for way in ALL_BUT_SAME},
        )
        for width in SHOWN_WIDTHS
    ]


def row_of(
    name: str, table: str, of: Costs, b: int, measured: Measured, rounds: Rounds,
    ranked: dict[tuple[str, int, int], Ranked], options: argparse.Namespace,
) -> Row:  # fmt: skip
    best = {way: measured.best(table, way) for way in WAYS}
    walked = None
    if name != "recorded, T = 0.7":
        batches = max(16, options.rounds // b)
        rates = {}
        for way in (SAME, RAW):
            plan = best[way]
            candidates = ranked["raw", max(plan.steps, 1), plan.topk]
            rates[way] = walk(rounds, candidates, plan, way, of, b, options.context, batches, options.seed)
        walked = rates[RAW] / rates[SAME] - 1
    return Row(
        rounds=name,
        costs=table,
        requests=b,
        tokens_per_second={way: float(measured.rates[table][way, best[way]].mean()) for way in WAYS},
        plans={way: str(best[way]) for way in WAYS},
        gains={way: measured.gain(table, way) for way in ALL_BUT_SAME},
        walked_gain=walked,
    )


def show_accepted(rows: list[Accepted], console: Console) -> None:
    for name in dict.fromkeys(row.rounds for row in rows):
        out = Table(title=f"tokens per request and round: {name}")
        for column in ("requests", "W", SAME, *WITH_EXACT_ROWS):
            out.add_column(column, justify="right")
        for row in (row for row in rows if row.rounds == name):
            cells = [f"{row.tokens[way]:.2f} ({_percent(row.more[way])})" for way in WITH_EXACT_ROWS]
            out.add_row(str(row.requests), f"{row.width:g}", f"{row.tokens[SAME]:.2f}", *cells)
        console.print(out)


def show_rows(rows: list[Row], console: Console) -> None:
    for name, table in dict.fromkeys((row.rounds, row.costs) for row in rows):
        simulated = "SIMULATED " if table == SIMULATED else ""
        out = Table(title=f"{simulated}tokens per second against equal trees: {name}; {table}")
        for column in ("requests", "equal trees", "by request", *ALL_BUT_SAME, "walked"):
            out.add_column(column, justify="right")
        for row in (row for row in rows if (row.rounds, row.costs) == (name, table)):
            cells = [_percent(row.gains[way]) for way in ALL_BUT_SAME]
            walked = "" if row.walked_gain is None else f"{row.walked_gain:+.1%}"
            out.add_row(str(row.requests), row.plans[SAME], row.plans[RAW], *cells, walked)
        console.print(out)


def _percent(value: tuple[float, float]) -> str:
    return f"{value[0]:+.1%} ±{value[1]:.1%}"


def run(options: argparse.Namespace, console: Console) -> Report:
    costs, accepted, rows = load_costs(console), [], []
    for name, rounds in load_rounds().items():
        ranked = rank(rounds)
        tables = {table: of for table, of in costs.items() if table == SIMULATED or name.startswith("recorded")}
        for b in options.requests:
            batches = max(16, options.rounds // b)
            measured = measure(rounds, ranked, tables, b, options.context, options.samples, batches, options.seed)
            accepted += accepted_rows(name, b, measured)
            rows += [row_of(name, table, of, b, measured, rounds, ranked, options) for table, of in tables.items()]
            console.print(f"{name}, {b} requests: done")
    show_accepted(accepted, console)
    show_rows(rows, console)
    return Report(
        context=options.context,
        samples=options.samples,
        rounds_per_sample=options.rounds,
        tables=costs,
        accepted=accepted,
        rows=rows,
    )


def main(arguments: list[str] | None = None) -> int:
    options, console = parse(arguments), Console(width=200)
    if options.record:
        rounds = record(options.prompts, options.tokens, options.temperature, console)
        rounds.save(options.record)
        console.print(f"{len(rounds.scores)} rounds of {len(rounds.starts)} responses, written to {options.record}")
        return 0
    report = run(options, console)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_json(report, options.json)
    console.print(f"written to {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
