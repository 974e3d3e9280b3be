"""Measures the privacy filter: what it finds, what it flags wrongly, and its speed; prints tables.

python benchmarks/privacy.py            the labelled texts of benchmarks/privacy_texts.py
python benchmarks/privacy.py --misses   print each text that was missed or flagged wrongly
python benchmarks/privacy.py --speed prompts.jsonl   also scan the prompts of this file, on one core
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from privacy_texts import NEGATIVES, POSITIVES, Labelled
from rich.console import Console
from rich.table import Table

from eagle_plugin.data.privacy.redact import Scanner
from eagle_plugin.data.sources.prompts import format_prompt, read_prompts


def main() -> None:
    """Run the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--misses", action="store_true", help="print each text that was missed or flagged wrongly")
    parser.add_argument("--speed", metavar="PROMPTS", help="a file of `eagle-plugin data prepare` whose scan is timed")
    arguments = parser.parse_args()
    scanner, console = Scanner(), Console(width=100)

    table = Table("type", "found", "labelled", title="recall: values that findings cover completely")
    missed = [case for case in POSITIVES if not _covers(scanner, case)]
    for kind in dict.fromkeys(case.type for case in POSITIVES):
        total = sum(case.type == kind for case in POSITIVES)
        table.add_row(kind, str(total - sum(case.type == kind for case in missed)), str(total))
    table.add_row("all", str(len(POSITIVES) - len(missed)), str(len(POSITIVES)))
    console.print(table)

    flagged = {text: found for text in NEGATIVES if (found := scanner.find(text))}
    console.print(f"false alarms: {len(flagged)} of {len(NEGATIVES)} texts with nothing private")
    if arguments.misses:
        for case in missed:
            console.print(f"missed {case.type}: {case.text}", markup=False)
        for text, found in flagged.items():
            console.print(f"false alarm {', '.join(hit.type for hit in found)}: {text}", markup=False)
    if arguments.speed:
        _time_file(scanner, arguments.speed, console)


def _covers(scanner: Scanner, case: Labelled) -> bool:
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
    main()
