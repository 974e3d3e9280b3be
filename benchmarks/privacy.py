"""Measures the privacy filter: what it finds, what it flags wrongly, and its speed; prints tables.

python benchmarks/privacy.py            three sets: written texts, generated texts (needs Faker), and tool results, code
                                        and JSON; of the last two the half `reported`; 1 if a limit is not reached
python benchmarks/privacy.py --misses   the same of the half `development`, with each text that was missed or flagged
                                        wrongly; those of the half `reported` are not shown
python benchmarks/privacy.py --speed prompts.jsonl   only scan the prompts of this file, on one core
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import privacy_tools
from privacy_sets import Labelled, written_texts
from rich.console import Console
from rich.table import Table

from eagle_plugin.learning.data.privacy.scanner import Scanner
from eagle_plugin.learning.data.sources.prompts import format_prompt, read_prompts

# Of these kinds docs/data.md says that they are not found.
NOT_LISTED = ("person's name", "identity number, not named")
VALID = "JSON that stays valid"
LEAST_RECALL, MOST_FALSE_ALARMS = 0.95, 0.01  # of each set, over the kinds that are listed
LIMITS = "95 % of the listed kinds, less than 1 % false alarms, and JSON stays valid"


@dataclass(frozen=True)
class Measured:
    """Whether one text gave the right result; `row` and `column` say where in the table it counts."""

    row: str
    column: str
    right: bool
    told: str  # what is printed with --misses


def main() -> int:
    """Run the measurements; 1 if a set does not reach the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--misses", action="store_true", help="print each text that was missed or flagged wrongly")
    parser.add_argument("--speed", metavar="PROMPTS", help="a file of `eagle-plugin data prepare` whose scan is timed")
    arguments = parser.parse_args()
    scanner, console = Scanner(), Console(width=120)
    if arguments.speed:
        _time_file(scanner, arguments.speed, console)
        return 0
    split = "development" if arguments.misses else "reported"
    reached = [
        _tell(console, "written texts", *_written(scanner), arguments.misses),
        _tell(console, f"generated texts, {split}", *_generated(scanner, split), arguments.misses),
        _tell(console, f"tool results, code and JSON, {split}", *_tools(scanner, split), arguments.misses),
    ]
    return 0 if all(reached) else 1


def _written(scanner: Scanner) -> tuple[list[Measured], list[Measured]]:
    private, harmless = written_texts()
    found = [Measured(case.type, "written", covers(scanner, case), repr(case.text)) for case in private]
    return found, [_alarm(scanner, "written", text) for text in harmless]


def _generated(scanner: Scanner, split: str) -> tuple[list[Measured], list[Measured]]:
    from privacy_generated import harmless_texts, private_texts

    private = [
        Measured(text.case.type, text.language, covers(scanner, text.case), repr(text.case.text))
        for text in private_texts(split)
    ]
    return private, [_alarm(scanner, language, text) for language, text in harmless_texts(split)]


def _tools(scanner: Scanner, split: str) -> tuple[list[Measured], list[Measured]]:
    private, texts = [], list(privacy_tools.private_texts(split))
    for one in texts:
        private.append(Measured(one.kind, one.wrapping, privacy_tools.is_hidden(one, scanner), repr(one.text)))
    for one in texts:
        if (valid := privacy_tools.stays_json(one.text, scanner)) is not None:
            private.append(Measured(VALID, one.wrapping, valid, repr(one.text)))
    return private, [_alarm(scanner, wrapping, text) for wrapping, text in privacy_tools.harmless_texts(split)]


def _alarm(scanner: Scanner, column: str, text: str) -> Measured:
    found = ", ".join(f"{hit.type} {text[hit.start : hit.end]!r}" for hit in scanner.find(text))
    return Measured("false alarms", column, not found, f"{found}: {text!r}")


def _tell(console: Console, title: str, private: list[Measured], harmless: list[Measured], show: bool) -> bool:
    """Print how many values are hidden, and how many harmless texts have findings; whether the limits are reached."""
    columns = list(dict.fromkeys(one.column for one in [*private, *harmless]))
    table = Table("type", *columns, "all", "%", title=f"{title}: values that are found completely")
    listed = [one for one in private if one.row not in (*NOT_LISTED, VALID)]
    for row in dict.fromkeys(one.row for one in private):
        table.add_row(row, *_cells([(one.column, one.right) for one in private if one.row == row], columns))
    table.add_section()
    table.add_row("all listed", *_cells([(one.column, one.right) for one in listed], columns))
    table.add_row("false alarms", *_cells([(one.column, not one.right) for one in harmless], columns))
    console.print(table)
    for one in [*private, *harmless] if show else []:
        if not one.right:
            console.print(f"{one.row}: {one.told}", markup=False, soft_wrap=True)
    recall = sum(one.right for one in listed) / len(listed)
    alarms = sum(not one.right for one in harmless) / len(harmless)
    valid = all(one.right for one in private if one.row == VALID)
    reached = recall >= LEAST_RECALL and alarms < MOST_FALSE_ALARMS and valid
    console.print(f"{'reached' if reached else 'NOT reached'}: {LIMITS}")
    return reached


def _cells(rows: list[tuple[str, bool]], languages: list[str]) -> list[str]:
    by_language = [[hit for language, hit in rows if language == one] for one in languages]
    hits = [hit for _, hit in rows]
    return [
        *(f"{sum(some)}/{len(some)}" if some else "" for some in (*by_language, hits)),
        f"{100 * sum(hits) / len(hits):.1f}",
    ]


def covers(scanner: Scanner, case: Labelled) -> bool:
    """Whether a finding covers the private value of a text completely."""
    start = case.text.index(case.value)
    found = scanner.find(case.text)
    return any(hit.start <= start and start + len(case.value) <= hit.end for hit in found)


def _time_file(scanner: Scanner, path: str, console: Console) -> None:
    prompts = list(_prompt_texts(path))
    size = sum(len(text.encode()) for text in prompts) / 1e6
    start = time.process_time()
    rows = sum(scanner.scan(text) for text in prompts)
    seconds = time.process_time() - start
    console.print(
        f"speed: {size / seconds:.2f} MB/s on one core ({size:.1f} MB); {rows} of {len(prompts)} prompts flagged"
    )


def _prompt_texts(path: str) -> Iterator[str]:
    for prompt in read_prompts(path):
        turns = prompt.messages or []
        yield "\n".join(str(turn.get("content") or "") for turn in turns) or prompt.prompt or format_prompt(prompt)


if __name__ == "__main__":
    sys.exit(main())
