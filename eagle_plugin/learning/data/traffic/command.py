"""`eagle-plugin capture`: what a server has recorded, and one file of it for `eagle-plugin data prepare`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.table import Table

from eagle_plugin.common.atomic_io import replace_output
from eagle_plugin.common.command_end import end_of
from eagle_plugin.common.command_line import Parser
from eagle_plugin.common.progress import ProgressBars
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.traffic.segments import (
    PRIVATE,
    check_folder,
    counts_of,
    recorded_answers,
    segments_of,
)
from eagle_plugin.traffic.metrics import DROPPED

DESCRIPTION = """\
Record the traffic of a server as training data, and show or export it.

A server of SGLang or vLLM with this plugin records answers to chats and
completions if EAGLE_CAPTURE names a folder when it starts. Private data is
filtered before anything is written. A request with the header
`X-Eagle-Capture: off` is not recorded.
"""
EXAMPLES = """\
examples:
  EAGLE_CAPTURE=/data/capture EAGLE_CAPTURE_RATE=0.1 sglang serve --model-path TARGET
  EAGLE_CAPTURE=/data/capture EAGLE_CAPTURE_LIMIT=50GB vllm serve TARGET
  eagle-plugin capture status /data/capture
  eagle-plugin capture export /data/capture --out traffic.jsonl
  eagle-plugin data prepare traffic.jsonl --keep-responses --out prompts.jsonl

settings of the server, in its environment:
  EAGLE_CAPTURE                folder of the records; without it nothing is recorded
  EAGLE_CAPTURE_RATE           share of the requests, 0 to 1 (default: 1)
  EAGLE_CAPTURE_LIMIT          size of all records (default: 10GB); then the oldest are removed
  EAGLE_CAPTURE_PRIVACY        drop (default) or redact answers with private data
  EAGLE_CAPTURE_PHONE_REGIONS  see `eagle-plugin data prepare --help`
  EAGLE_CAPTURE_RECOGNISER     MODULE:FUNCTION that finds more types, such as names of persons
  EAGLE_CAPTURE_TOKENIZER      folder of the target: keeps token ids, which it can then filter
  EAGLE_CAPTURE_PYTHON         interpreter that has eagle-plugin[privacy], if the server's has not
"""


@dataclass
class Recording:
    """What is in a folder."""

    segments: int = 0
    records: int = 0
    bytes: int = 0
    first: float | None = None  # seconds since 1970
    last: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments)


def _status(arguments: argparse.Namespace) -> int:
    folder, recording = check_folder(arguments.folder), Recording()
    for line, record in recorded_answers(folder):
        recording.records += 1
        recording.bytes += len(line)
        time = record.get("time")
        recording.first = time if recording.first is None else recording.first
        recording.last = time
    recording.segments = len(segments_of(folder))
    counts = counts_of(folder)
    if arguments.json:
        print(json.dumps(vars(recording) | {"counts": counts}))
        return 0
    table = Table("", "", title=str(folder), title_justify="left", show_header=False)
    table.add_row("records", f"{recording.records:,}")
    table.add_row("size", f"{recording.bytes / 1e6:,.1f} MB in {recording.segments} files")
    table.add_row("first", _moment(recording.first))
    table.add_row("last", _moment(recording.last))
    table.add_row("answers with private data", f"{counts['filtered']:,}")
    table.add_row("files removed by the size limit", f"{counts['removed_segments']:,}")
    for name, count in sorted(counts.items()):
        if name.startswith(DROPPED):
            table.add_row(f"not recorded: {name.removeprefix(DROPPED)}", f"{count:,}")
    Console().print(table)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    folder, out = check_folder(arguments.folder), Path(arguments.out)
    if out.resolve() in [path.resolve() for path in segments_of(folder)]:
        raise DataError(f"--out {out} is a file of the capture; give another name")
    records = 0
    with ProgressBars(console=Console(stderr=True)) as progress, replace_output(out) as temporary:
        task = progress.add_task("exporting", total=len(segments_of(folder)))
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
            for line, _ in recorded_answers(folder, ended=lambda path: progress.advance(task)):
                file.write(line)
                records += 1
        if not records:
            raise DataError(f"{folder} has no records yet; send requests to the server that captures into it")
    Console(stderr=True).print(
        f"{records:,} records in {out}; next: eagle-plugin data prepare {out} --keep-responses --out prompts.jsonl",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _moment(time: float | None) -> str:
    return "-" if time is None else f"{datetime.fromtimestamp(time, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="eagle-plugin capture", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw)
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    status = actions.add_parser("status", help="records, size, time span, and what was not recorded")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.set_defaults(run=_status)
    export = actions.add_parser("export", help="all records as one file, which `eagle-plugin data prepare` reads")
    export.add_argument("--out", required=True, metavar="FILE", help="the JSON-lines file to write")
    export.set_defaults(run=_export)
    for action in (status, export):
        action.add_argument("folder", metavar="FOLDER", help="the folder that EAGLE_CAPTURE named")
    return parser


if __name__ == "__main__":
    raise SystemExit(end_of(main, owns_process=True))
