"""Measures the privacy filter: what it finds, what it flags wrongly, and its speed; prints tables.

python benchmarks/privacy.py            the written texts, and the reported split of the generated ones (needs Faker)
python benchmarks/privacy.py --misses   the written texts and the development split, with each text that was missed or
                                        flagged wrongly; those of the reported split are not shown
python benchmarks/privacy.py --speed prompts.jsonl   only scan the prompts of this file, on one core
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
    scanner, console = Scanner(), Console(width=120)
    if arguments.speed:
        _time_file(scanner, arguments.speed, console)
        return
    written = [("written", case) for case in POSITIVES]
    _measure(scanner, console, "written texts", written, [("written", text) for text in NEGATIVES], arguments.misses)

    from privacy_generated import harmless_texts, private_texts

    split = "development" if arguments.misses else "reported"
    private = [(text.language, text.case) for text in private_texts(split)]
    _measure(scanner, console, f"generated texts, {split}", private, harmless_texts(split), arguments.misses)


def _measure(
    scanner: Scanner,
    console: Console,
    title: str,
    private: list[tuple[str, Labelled]],
    harmless: list[tuple[str, str]],
    show: bool,
) -> None:
    """Print how many values are covered by findings, and how many harmless texts have findings, by language."""
    languages = list(dict.fromkeys([language for language, _ in private] + [language for language, _ in harmless]))
    table = Table("type", *languages, "all", "%", title=f"{title}: values that findings cover completely")
    found = [(case.type, language, covers(scanner, case)) for language, case in private]
    types = list(dict.fromkeys(type for type, *_ in found))
    for wanted in (*types, None):
        rows = [(language, hit) for type, language, hit in found if wanted in (type, None)]
        table.add_row(wanted or "all", *_cells(rows, languages))
    flagged = [(language, bool(scanner.find(text))) for language, text in harmless]
    table.add_section()
    table.add_row("false alarms", *_cells(flagged, languages))
    console.print(table)
    if show:
        for (_, case), (*_, hit) in zip(private, found, strict=True):
            if not hit:
                console.print(f"missed {case.type}: {case.text!r}", markup=False, soft_wrap=True)
        for (_, text), (_, hit) in zip(harmless, flagged, strict=True):
            if hit:
                types_found = ", ".join(f"{hit.type} {text[hit.start : hit.end]!r}" for hit in scanner.find(text))
                console.print(f"false alarm {types_found}: {text!r}", markup=False, soft_wrap=True)


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
    main()
