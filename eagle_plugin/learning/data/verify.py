"""`eagle-plugin data verify`: read feature stores and training runs in full and compare every byte with its sha256.

`train` checks existence, sizes and headers when it opens a store, and a document when it reads it first. This command
finds the rest before a long run. Of a training run, the checkpoints are verified.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from eagle_plugin.common.command_line import Parser
from eagle_plugin.common.file_digests import DIGESTS, find_damage, recorded_bytes
from eagle_plugin.common.progress import ProgressBars
from eagle_plugin.common.url_credentials import without_credentials
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.contents import REPAIR, Contents, read_contents
from eagle_plugin.learning.data.store.objects import Folder, open_folder
from eagle_plugin.learning.data.store.shards import Shard, ShardDamage, read_in_full

READERS = 8  # shards that are read at the same time
EXAMPLES = """\
examples:
  eagle-plugin data verify features/
  eagle-plugin data verify s3://bucket/features
  eagle-plugin data verify out/head                                   the checkpoints of a training run
  eagle-plugin data verify out/head/checkpoints/update-00000200

One line per problem; the exit code is 0 if there is none. To repair a store, run its `data features` command again: it
extracts exactly what is missing or damaged. A training run continues from its newest checkpoint that is not damaged.
"""
Report = Callable[[float], None]  # gets the bytes of every read


class Job(NamedTuple):
    """What is to read below one path."""

    size: int  # bytes
    what: str
    run: Callable[[Report], list[str]]  # reads it; returns "NAME is ..." of every problem
    repair: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 if nothing is damaged or missing.

    Raises:
        DataError: something is, or a path has neither a store nor a checkpoint.
    """
    parser = Parser(
        prog="eagle-plugin data verify",
        description=__doc__.split("\n", 1)[1] if __doc__ else None,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="folder or URL of a store; folder of a training run")
    failed = []
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with ProgressBars(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        for path in parser.parse_args(argv).paths:
            job, shown = _find(path), without_credentials(path)
            task = bar.add_task("reading", total=job.size)
            problems = job.run(partial(bar.advance, task))
            for problem in problems:
                print(f"{shown}: {problem}", flush=True)
            if problems:
                failed.append(f"{shown} has {len(problems):,} missing or damaged; {job.repair}")
            else:
                print(f"{shown}: {job.what}, {job.size / 1e6:,.1f} MB read, nothing is missing or damaged", flush=True)
    if failed:
        raise DataError("; ".join(failed))
    return 0


def _find(path: str) -> Job:
    folder = Path(path)
    checkpoints = sorted(folder.glob("checkpoints/update-*"))
    if (folder / "state.json").is_file():
        checkpoints = [folder]
    if not checkpoints:
        return _store_job(path)
    size = sum(map(recorded_bytes, checkpoints))
    repair = "a run continues from its newest checkpoint that is not damaged"
    return Job(size, f"{len(checkpoints)} checkpoints", lambda report: _read_checkpoints(checkpoints, report), repair)


def _read_checkpoints(checkpoints: Sequence[Path], report: Report) -> list[str]:
    problems = []
    for path in checkpoints:
        if (path / DIGESTS).exists():
            problems += [f"{path.name}: {problem}" for problem in find_damage(path, report)]
        else:
            problems.append(f"{path.name} has no {DIGESTS}, so it cannot be verified")
    return problems


def _store_job(url: str) -> Job:
    folder = open_folder(url)
    found = read_contents(folder)
    size = sum(shard.size for shard in found.shards.values())
    what = f"{len(found.shards):,} shards, {len(found.entries):,} documents"
    return Job(size, what, lambda report: _read_store(folder, found, report), REPAIR)


def _read_store(folder: Folder, found: Contents, report: Report) -> list[str]:
    def read(shard: Shard) -> str | None:
        left = shard.size
        try:
            for size in read_in_full(folder, shard, found.manifest):
                report(size)
                left -= size
        except ShardDamage as damage:
            return str(damage)
        except FileNotFoundError:
            return "is missing"
        finally:
            report(left)
        return None

    with ThreadPoolExecutor(READERS) as pool:
        reasons = dict(zip(found.shards, pool.map(read, found.shards.values()), strict=True))
    problems = found.problems | {name: reason for name, reason in reasons.items() if reason is not None}
    return [f"{name} {reason}" for name, reason in sorted(problems.items())]
