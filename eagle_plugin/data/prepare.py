"""`eagle-plugin data prepare`: files of prompts in any known format become one file of prompts in normal form."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from eagle_plugin.atomic_io import write_output
from eagle_plugin.data.privacy.filter import PRIVATE, Draft, Screen, Screened, Settings, open_screen
from eagle_plugin.data.privacy.redact import MODES
from eagle_plugin.data.rows import DataError
from eagle_plugin.data.sources.conversation import Unusable
from eagle_plugin.data.sources.formats import Record, read_records
from eagle_plugin.data.sources.prompts import Prompt, digest, format_prompt, normalise, seal
from eagle_plugin.data.sources.record_files import CUT, Skipped

DUPLICATE = "duplicate"
EXAMPLES = """\
formats (told from the first 20 records, which must agree; JSON lines, .gz, .zst, a JSON array or Parquet):
  ShareGPT            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
  OpenAI chat         {"messages": [{"role": "user", "content": "Hi"}]}
  OpenAI batch        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ...}}
  OpenAI completions  {"prompt": "Once upon a time"}
  SageMaker capture   {"captureData": {"endpointInput": {"data": "...", "encoding": "BASE64"}, ...}, ...}
  plugin capture      {"v": 1, "id": "...", "request": {"messages": ...}, "response": {...}}

examples:
  eagle-plugin data prepare chats.json --out prompts.jsonl
  eagle-plugin data prepare capture/*.jsonl.gz --privacy redact --keep-responses --out prompts.jsonl
  zcat big.gz | eagle-plugin data prepare - --privacy off --out prompts.jsonl
  PYTHONPATH=. eagle-plugin data prepare chats.json --recogniser my_names:find --out prompts.jsonl

Recorded answers are left away, since a draft head should learn what its own target says: `eagle-plugin data generate`
asks it. With --keep-responses they stay, for `eagle-plugin data render`. Names of persons are found only by a
recogniser of yours: a function from a text to (type, start, end) triples.
"""


@dataclass
class Summary:
    """What was read, kept and left out."""

    read: int = 0
    kept: Counter[str] = field(default_factory=Counter)  # by split
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    first: dict[str, str] = field(default_factory=dict)  # the first place of a reason
    found: Counter[str] = field(default_factory=Counter)  # private data by type
    private: int = 0  # prompts with private data

    def skip(self, where: str, reason: str) -> None:
        """Count something left out."""
        self.skipped[reason] += 1
        self.first.setdefault(reason, where)


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare prompts; returns the exit code."""
    arguments = _parser().parse_args(argv)
    console = Console(stderr=True)
    if not 0 <= arguments.val_share < 1:
        raise DataError(f"--val-share is {arguments.val_share}, wanted a share from 0 to below 1")
    out = Path(arguments.out)
    for name in arguments.files:
        if name != "-" and Path(name).resolve() == out.resolve():
            raise DataError(f"--out {out} is one of the files to read; give another name")
    workers = len(os.sched_getaffinity(0)) if arguments.workers is None else arguments.workers
    if workers < 1:
        raise DataError(f"--workers is {workers}, wanted 1 or more")
    settings = Settings(arguments.privacy, arguments.recogniser, arguments.tokenizer)
    summary = prepare(
        arguments.files,
        out,
        settings,
        workers=workers,
        val_share=arguments.val_share,
        keep_responses=arguments.keep_responses,
        source=arguments.source,
        console=console,
    )
    _print(summary, settings, out, console)
    return 0


def prepare(
    files: Sequence[str],
    out: Path,
    settings: Settings,
    *,
    workers: int = 1,
    val_share: float = 0.02,
    keep_responses: bool = False,
    source: str | None = None,
    console: Console | None = None,
) -> Summary:
    """Write the prompts of all files to `out`, whole or not at all; the same files give the same bytes.

    Raises:
        DataError: a file that cannot be read, a filter that cannot be loaded, or not one prompt left.
    """
    summary = Summary()
    seen: set[bytes] = set()

    def lines(screen: Screen, advance: Callable[[int], None]) -> Iterator[str]:
        for screened in screen(_drafts(files, keep_responses, source, summary, advance)):
            for prompt in _count(screened, seen, summary):
                sealed = seal(prompt, val_share)
                summary.kept[sealed.split] += 1
                yield format_prompt(sealed)
        if not summary.kept:
            reasons = ", ".join(f"{count} {reason}" for reason, count in summary.skipped.most_common())
            raise DataError(f"no prompt is left of {summary.read} records: {reasons}; give other files")

    # The workers first: they must not inherit the thread that draws the bar.
    with open_screen(settings, workers) as screen, _progress(files, console, summary) as advance:
        write_output(out, lines(screen, advance))
    return summary


def _drafts(
    files: Sequence[str], keep_responses: bool, source: str | None, summary: Summary, advance: Callable[[int], None]
) -> Iterator[Draft]:
    """The records of all files in normal form, each one once."""
    seen: set[bytes] = set()
    for name in files:
        for item in read_records(name, advance):
            summary.read += not (isinstance(item, Skipped) and item.reason == CUT)
            if isinstance(item, Skipped):
                summary.skip(item.where, item.reason)
                continue
            record = replace(item, source=source) if source else item
            try:
                draft = _draft(record, keep_responses)
            except Unusable as reason:
                summary.skip(record.where, str(reason))
                continue
            # Before the filter, which is slow; after it once more, for prompts that differ in private data alone.
            if (key := digest(draft.prompt)) in seen:
                summary.skip(record.where, DUPLICATE)
            else:
                seen.add(key)
                yield draft


def _draft(record: Record, keep_responses: bool) -> Draft:
    prompt = normalise(record, keep_responses)
    ids = record.answer.token_ids if record.answer else None
    if not (keep_responses and record.prompt_ids and ids and record.answer):
        return Draft(record.where, prompt)
    # What was served, token for token: better than the same text encoded again.
    response = {"token_ids": ids, "finish": record.answer.finish or "recorded"}
    return Draft(record.where, prompt, Prompt("", record.source, prompt_ids=record.prompt_ids, response=response))


def _count(screened: Screened, seen: set[bytes], summary: Summary) -> Iterator[Prompt]:
    summary.found.update(screened.found)
    summary.private += bool(screened.found)
    if screened.prompt is None:
        summary.skip(screened.where, screened.reason)
    elif (key := digest(screened.prompt)) in seen:
        summary.skip(screened.where, DUPLICATE)
    else:
        seen.add(key)
        yield screened.prompt


@contextmanager
def _progress(files: Sequence[str], console: Console | None, summary: Summary) -> Iterator[Callable[[int], None]]:
    """A bar over the bytes of all files; stdin has no known size."""
    sizes = [Path(name).stat().st_size for name in files if Path(name).is_file()]
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rows]:,} prompts"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=console is None) as bar:
        task = bar.add_task("preparing", total=sum(sizes) if len(sizes) == len(files) else None, rows=0)
        yield lambda count: bar.update(task, advance=count, rows=summary.kept.total())


def _print(summary: Summary, settings: Settings, out: Path, console: Console) -> None:
    if CUT in summary.first:
        console.print(f"warning: {summary.first[CUT]}: {CUT}; it was read up to there", style="yellow", markup=False)
    table = Table("", "prompts", "first at", title=escape(f"{out}"))
    table.add_row("read", f"{summary.read:,}", "")
    for split, count in sorted(summary.kept.items()):
        table.add_row(f"kept for {split}", f"{count:,}", "")
    for reason, count in summary.skipped.most_common():
        table.add_row(f"left out: {reason}", f"{count:,}", escape(Path(summary.first[reason]).name))
    if settings.mode != "off" and PRIVATE not in summary.skipped:
        table.add_row(f"with private data ({settings.mode})", f"{summary.private:,}", "")
    for type, count in summary.found.most_common():
        table.add_row(f"  {escape(type)} found", f"{count:,}", "")
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eagle-plugin data prepare",
        description="Turn files of prompts into one file of prompts: normalised, screened, each once, split.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="files of prompts; - is stdin")
    parser.add_argument("--out", required=True, metavar="FILE", help="the JSON-lines file to write")
    parser.add_argument(
        "--privacy", choices=MODES, default="drop", help="what to do with private data (default: drop the prompt)"
    )
    parser.add_argument(
        "--recogniser", metavar="MODULE:FUNCTION", help="a function of yours that finds more, names for instance"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of the target, to read prompts that are token ids")
    parser.add_argument("--workers", type=int, metavar="N", help="processes of the filter (default: one a core)")
    parser.add_argument(
        "--val-share", type=float, default=0.02, metavar="SHARE", help="share of the prompts held out (default: 0.02)"
    )
    parser.add_argument("--keep-responses", action="store_true", help="keep the recorded answers")
    parser.add_argument("--source", metavar="NAME", help="what evaluation calls these prompts (default: their format)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
