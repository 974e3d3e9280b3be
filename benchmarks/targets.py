"""Which targets the plugin serves in which engine, with which kind of head: tried one by one, with tiny random models.

    python benchmarks/targets.py [--engine sglang] [--family qwen3 ...] [--out out]
    python benchmarks/targets.py --features          checkpoints and flags beyond families, by their tests
    python benchmarks/targets.py --document          the tables of docs/targets.md, of out/targets.json

For every family and kind of head an engine is started twice in float32, plain and with the plugin's flags. Both answer
the same questions without pictures, greedily: the texts must be equal. (vLLM has no plain decoding of Qwen3-Next and
Qwen3.5 in float32 on a CPU: its texts are compared with SGLang's.) The times are those of one request at a time and of
trees of one shape; those of tiny models are the engine's, so that they say what a round adds to a step there, and
nothing about models of real size.
The result is in out/targets.json; the exit code is 1 if a text differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Column, Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))  # before this folder

from word_prompts import make_prompts

from benchmarks.engine_tests import replace_table
from benchmarks.target_features import BEGIN as FEATURES_BEGIN
from benchmarks.target_features import FEATURES, FeatureRow, features_table, try_feature
from benchmarks.target_servers import KINDS, SHAPE, WITHOUT_PLAIN, specs_of
from eagle_plugin.bench.load import Completion, LoadError, Sampling, accept_length, ask_all
from eagle_plugin.bench.outputs import write_json
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.quartiles import Strict
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.servers import PLUGIN_LINE, SERVING, Server, ServerError
from eagle_plugin.bench.spec import EngineName
from eagle_plugin.common.command_end import sigterm_as_exit

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 64
NAMES = {
    "llama": "Llama 2, 3",
    "llama4_text": "Llama 4 (text)",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3, Kimi-K2",
    "gemma3_text": "Gemma 3 (text)",
    "gemma4_text": "Gemma 4 (text)",
    "gpt_oss": "GPT-OSS",
    "llama4": "Llama 4, multimodal class",
    "gemma4": "Gemma 4, multimodal class",
    "mistral3": "Mistral 3",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5-MoE",
}
ENGINES: tuple[EngineName, ...] = ("sglang", "vllm")
BEGIN = "<!-- benchmarks/targets.py --document -->\n"


class Row(Strict):
    """One family in one engine with one kind of head."""

    family: str  # the model_type of transformers
    engine: str
    head: str
    served_by: str  # "plugin", "engine" or "nobody"
    reason: str = ""  # where it is not the plugin
    greedy_equal: bool | None = None  # None: nothing was compared
    accept_length: float | None = None
    compared_with: str = ""  # the engine of the plain texts, where it is not this one
    round_ms_over_plain_ms: float | None = None  # a round, draft included, over a plain step; prompts count as one each


class Document(Strict):
    """out/targets.json."""

    shape: tuple[int, int, int]
    tokens: int
    rows: list[Row]
    features: list[FeatureRow] = []


class Answers(NamedTuple):
    """What one server answered."""

    together: list[Completion]
    alone: list[Completion]


def ask(server: Server) -> Answers:
    """Some questions at a time, and a few one by one, which are timed."""
    questions = [Question(id=str(i), group="words", prompt=p) for i, p in enumerate(make_prompts(16))]
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    together = ask_all(server.endpoint, questions, sampling, concurrency=8)
    return Answers(together, ask_all(server.endpoint, questions[:4], sampling))


def compare(row: Row, plain: Answers, plugin: Answers) -> Row:
    """The row with what the two servers' answers say."""

    def seconds(answers: Sequence[Completion]) -> float:  # of prompts too: vLLM may send many tokens in one chunk
        return sum(answer.total_s for answer in answers)

    responses = [[answer.output for part in answers for answer in part] for answers in (plain, plugin)]
    steps = sum(answer.completion_tokens for answer in plain.alone)
    rounds = sum(1 + (answer.verify_rounds or 0) for answer in plugin.alone)
    ratio = seconds(plugin.alone) / rounds / (seconds(plain.alone) / steps)
    tells = len(set(responses[0])) > 1
    return row.model_copy(
        update={
            "greedy_equal": responses[0] == responses[1] if tells else None,
            "reason": row.reason if tells else "all answers are the same, as where no token has characters",
            "accept_length": accept_length(plugin.together),
            "round_ms_over_plain_ms": None if row.compared_with else ratio,
        }
    )


def rows_of(engine: EngineName, family: str, logs: Path) -> Iterator[Row]:
    """Start the servers of one family in one engine, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        specs = specs_of(engine, family, Path(folder))
        plain: Answers | None = None
        other = WITHOUT_PLAIN.get((engine, family), "")
        for name, spec in specs.items():
            row = Row(family=family, engine=engine, head=KINDS.get(name, ""), served_by="nobody", compared_with=other)
            server = Server.of(spec, logs / family)
            server.mode = None  # one that the plugin leaves to the engine is a row too
            try:
                with server:
                    server.wait_ready()
                    answers = ask(server)
            except (ServerError, LoadError) as error:
                reason = next((line for line in reversed(str(error).splitlines()) if "Error" in line), str(error))
                if name == "plain":
                    yield from (row.model_copy(update={"head": head, "reason": reason}) for head in KINDS.values())
                    return
                yield row.model_copy(update={"reason": reason.strip(" |")})
                continue
            if plain is None:
                plain = answers
                continue
            lines = PLUGIN_LINE.findall(server.log_text())
            served = any(SERVING.search(line) for line in lines)
            row = row.model_copy(update={"served_by": "plugin" if served else "engine"})
            if not served:
                row = row.model_copy(update={"reason": lines[-1] if lines else "no line of the plugin"})
            yield compare(row, plain, answers)


def served_table(rows: Sequence[Row]) -> str:
    """Families by engines, in Markdown: the kinds of heads that the plugin serves with equal texts."""
    lines = ["| target | SGLang | vLLM |", "|---|---|---|"]
    for family in NAMES:
        cells = []
        for engine in ENGINES:
            of = [row for row in rows if (row.family, row.engine) == (family, engine)]
            served = [row.head for row in of if row.served_by == "plugin" and row.greedy_equal]
            others = {
                "silent" if row.served_by == "plugin" and row.greedy_equal is None else row.served_by
                for row in of
                if row.head not in served
            }
            rest = {
                "engine": "the engine's own worker",
                "nobody": "does not start",
                "plugin": "**differs**",
                "silent": "served, not compared",
            }
            parts = [", ".join(served)] if served else []
            parts += [rest[by] for by in sorted(others)] if not served or others - {"nobody", "engine"} else []
            cells.append("; ".join(parts) or "not tried")
        lines.append(f"| {NAMES[family]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_document(path: Path, rows: Sequence[Row], features: Sequence[FeatureRow]) -> None:
    """Replace the tables in this file. ValueError where their marks are not there."""
    replace_table(path, BEGIN, served_table(rows))
    replace_table(path, FEATURES_BEGIN, features_table(features))


def show(rows: Sequence[Row], console: Console) -> None:
    """The result as a table."""
    table = Table(
        Column("family", no_wrap=True), "engine", "head", "served by", "text equal", "accept length", "round / step"
    )
    for row in rows:
        length, ratio = row.accept_length, row.round_ms_over_plain_ms
        numbers = [f"{value:.2f}" if value is not None else "" for value in (length, ratio)]
        equal = {None: "", True: "yes", False: "[bold red]no[/]"}[row.greedy_equal]
        table.add_row(row.family, row.engine, row.head, row.served_by, equal, *numbers)
    console.print(table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, nargs="+", default=list(ENGINES), help="default: both")
    parser.add_argument("--family", choices=list(NAMES), nargs="+", default=list(NAMES), help="default: all")
    names = sorted({feature.name for feature in FEATURES})
    parser.add_argument("--features", choices=names, nargs="*", help="try these in place of families; none named: all")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of targets.json (default: out)")
    parser.add_argument(
        "--document", action="store_true", help="write the tables of out/targets.json into docs/targets.md"
    )
    return parser.parse_args(argv)


def kept(path: Path) -> Document:
    """What earlier runs found; what is tried again replaces its rows."""
    if path.exists():
        return Document.model_validate_json(path.read_text(encoding="utf-8"))
    return Document(shape=SHAPE, tokens=TOKENS, rows=[])


def try_features(chosen: Sequence[str], path: Path, console: Console) -> int:
    """Run the tests of these features, all if none is named; 1 if one failed."""
    document, steps = kept(path), Steps(console)
    wanted = [feature for feature in FEATURES if not chosen or feature.name in chosen]
    rows = {(row.feature, row.engine): row for row in document.features}
    with sigterm_as_exit(), steps.step("features") as step:
        for number, feature in enumerate(wanted):
            step.update(f"{number / len(wanted):.0%}, {feature.name} in {feature.engine}", number / len(wanted))
            log = path.parent / "logs" / "features" / f"{number}-{feature.engine}.log"
            rows[feature.name, feature.engine] = try_feature(feature, log)
            write_json(document.model_copy(update={"features": list(rows.values())}), path)
    console.print(features_table(list(rows.values())))
    return int(any(row.served_by != "plugin" for row in rows.values()))


def main(argv: Sequence[str] | None = None) -> int:
    """Try the targets, or write the table of docs/targets.md; 1 if a text differs."""
    options, console = parse(argv), Console()
    path = options.out / "targets.json"
    if options.document:
        if not path.exists():
            console.print(f"there is no {path}: run python benchmarks/targets.py first")
            return 2
        write_document(ROOT / "docs/targets.md", kept(path).rows, kept(path).features)
        return 0
    if options.features is not None:
        return try_features(options.features, path, console)
    document = kept(path)
    rows: dict[tuple[str, str, str], Row] = {(r.family, r.engine, r.head): r for r in document.rows}
    steps, tried = Steps(console), [(e, f) for e in options.engine for f in options.family]
    with sigterm_as_exit(), steps.step("targets") as step:
        for number, (engine, family) in enumerate(tried):
            step.update(f"{number / len(tried):.0%}, {family} in {engine}", number / len(tried))
            for row in rows_of(engine, family, options.out / "logs"):
                rows[row.family, row.engine, row.head] = row
            # Whole after every family: a run that ends early leaves what it found.
            write_json(document.model_copy(update={"rows": list(rows.values())}), path)
    show(list(rows.values()), console)
    return int(any(row.greedy_equal is False for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
