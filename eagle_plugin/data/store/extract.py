"""`eagle-plugin data features`: run the target over token rows and keep its hidden states in a feature store."""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from eagle_plugin.data.masks import MaskReport
from eagle_plugin.data.rows import DataError, TokenRow, read_rows
from eagle_plugin.data.store.feature_store import SHARD_BYTES, Document, FeatureWriter
from eagle_plugin.data.store.features import Taps, check_aux_layers, default_aux_layers, load_target
from eagle_plugin.data.store.manifest import Manifest, target_digests

WINDOW_BATCHES = 64  # rows of so many batches are sorted by length together: little padding, little memory
MIN_RESPONSE = 2  # a head reads one response token and predicts the next
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
EXAMPLES = """\
examples:
  eagle-plugin data features rows.jsonl --target models/llama --store features/
  eagle-plugin data features rows.jsonl --target models/llama --store s3://bucket/features --aux-layers 2,16,29
  torchrun --nproc-per-node 8 -m eagle_plugin.data.store.extract rows.jsonl --target models/llama --store /nvme/features

Run it again after an interruption: finished documents are passed over.
Object stores take their settings from the environment: AWS_ENDPOINT, AWS_REGION, AWS_ACCESS_KEY_ID, ...
"""


@dataclass
class Counts:
    """What became of the rows of one rank."""

    done: int = 0  # documents extracted now
    tokens: int = 0
    padded: int = 0  # tokens with their padding
    kept: int = 0  # documents that were in the store already
    dropped: int = 0  # rows cut inside their prompt
    passed_tokens: int = 0  # of kept and dropped rows
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when every row of this rank is in the store."""
    arguments = _parse(argv)
    reuse_memory()
    rank, world, device = _place(arguments)
    total, tokens = survey_rows(arguments.rows, arguments.max_length, rank, world, arguments.allow_odd_masks)
    console = Console(stderr=True)
    console.print(f"loading {arguments.target}", highlight=False)
    model = load_target(arguments.target, DTYPES[arguments.dtype], device)
    config = model.config.get_text_config()
    layers = _aux_layers(arguments.aux_layers, config.num_hidden_layers)
    with Taps(model, layers) as taps:
        digests: dict[str, Any] = dict(target_digests(arguments.target))
        manifest = Manifest(
            **digests,
            target=Path(arguments.target).resolve().name,
            aux_layers=layers,
            hidden_size=taps.hidden_size,
            num_layers=config.num_hidden_layers,
            vocab_size=taps.readout.weight.shape[0],
            dtype=arguments.dtype,
            max_length=arguments.max_length,
            logit_factor=taps.readout.factor,
            softcap=taps.readout.softcap,
        )
        rows = (row for k, row in enumerate(read_rows(arguments.rows)) if k % world == rank)
        with (
            FeatureWriter(arguments.store, manifest, rank, arguments.shard_mib << 20) as writer,
            _bar(console, shown=rank == 0) as bar,
        ):
            task = bar.add_task("features", total=tokens, rate="")
            counts = Counts()
            for _ in extract(taps, rows, writer, counts, arguments.max_length, arguments.batch_tokens):
                bar.update(task, completed=counts.tokens + counts.passed_tokens, rate=f"{counts.rate:,.0f} tokens/s")
    _report(arguments, counts, total, rank, world)
    return 0


def extract(
    taps: Taps, rows: Iterable[TokenRow], writer: FeatureWriter, counts: Counts, max_length: int, batch_tokens: int
) -> Iterator[None]:
    """Write the documents of rows to a store, and yield after every batch with the counts brought up to date.

    Rows are cut to max_length tokens on the right, and dropped where fewer than MIN_RESPONSE response tokens are left.
    A batch holds at most batch_tokens tokens with padding, or one row.

    Raises:
        DataError: a token id is beyond the target's vocabulary.
    """
    started = time.perf_counter()
    for batch in form_batches(_usable(rows, writer.done, counts, max_length), batch_tokens):
        lengths = [_length(row) for row in batch]
        ids = torch.zeros(len(batch), lengths[0], dtype=torch.int64)
        for place, row in enumerate(batch):
            ids[place, : lengths[place]] = torch.tensor(row.prompt_ids + row.response_ids)
        if int(ids.max()) >= taps.readout.weight.shape[0]:
            raise DataError(
                f"a row holds token {int(ids.max())}, and the target's vocabulary ends at "
                f"{taps.readout.weight.shape[0] - 1}; generate the rows with this target"
            )
        aux, last = taps.run(ids, lengths)
        aux, last = None if aux is None else aux.cpu(), last.cpu()
        for place, (row, n) in enumerate(zip(batch, lengths, strict=True)):
            mask = torch.arange(n) >= len(row.prompt_ids)
            own_aux = None if aux is None else aux[place, :n]
            writer.add(Document(row.id, row.source, row.split, ids[place, :n], mask, own_aux, last[place, :n]))
        counts.done += len(batch)
        counts.tokens += sum(lengths)
        counts.padded += ids.numel()
        counts.seconds = time.perf_counter() - started
        yield


def _usable(rows: Iterable[TokenRow], done: set[str], counts: Counts, max_length: int) -> Iterator[TokenRow]:
    """The rows to run, cut."""
    for row in rows:
        response = row.response_ids[: max(0, max_length - len(row.prompt_ids))]
        if len(response) >= MIN_RESPONSE and row.id not in done:
            yield replace(row, response_ids=response)
            continue
        counts.kept += row.id in done
        counts.dropped += row.id not in done
        counts.passed_tokens += min(_length(row), max_length)


def form_batches(rows: Iterable[TokenRow], batch_tokens: int) -> Iterator[list[TokenRow]]:
    """Group rows of like length, longest first, so that rows times the longest is at most batch_tokens."""

    def cut(window: list[TokenRow]) -> Iterator[list[TokenRow]]:
        batch: list[TokenRow] = []
        for row in sorted(window, key=_length, reverse=True):
            if batch and (len(batch) + 1) * _length(batch[0]) > batch_tokens:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    window, tokens = [], 0
    for row in rows:
        window.append(row)
        tokens += _length(row)
        if tokens >= WINDOW_BATCHES * batch_tokens:
            yield from cut(window)
            window, tokens = [], 0
    yield from cut(window)


def _length(row: TokenRow) -> int:
    return len(row.prompt_ids) + len(row.response_ids)


def survey_rows(
    path: str | Path, max_length: int, rank: int = 0, world: int = 1, allow_odd_masks: bool = False
) -> tuple[int, int]:
    """Read all rows once: (rows, tokens after cutting) of this rank.

    Raises:
        DataError: an id comes twice, or the rows' masks cannot be right (`masks.MaskReport`).
    """
    seen: set[str] = set()
    masks = MaskReport()
    total = tokens = 0
    for k, row in enumerate(read_rows(path)):
        if row.id in seen:
            raise DataError(f"{path} has two rows with id {row.id!r}; give every row its own id")
        seen.add(row.id)
        masks.add(row, allow=allow_odd_masks)
        if k % world == rank:
            total += 1
            tokens += min(_length(row), max_length)
    if not seen:
        raise DataError(f"{path} holds no rows; generate some with `eagle-plugin data generate`")
    masks.judge(allow=allow_odd_masks)
    return total, tokens


def reuse_memory() -> None:
    """Keep freed memory in the process: glibc else returns each large tensor, and the kernel clears the next one."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # malloc.h
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 64 << 20)


def _aux_layers(text: str | None, num_layers: int) -> tuple[int, ...]:
    if text is None:
        return default_aux_layers(num_layers)
    if text == "none":
        return ()
    try:
        return check_aux_layers([int(part) for part in text.split(",")], num_layers)
    except ValueError as error:
        raise DataError(f"--aux-layers {text} is no list of numbers such as 2,15,27, nor none; correct it") from error


def _place(arguments: argparse.Namespace) -> tuple[int, int, str]:
    try:
        rank = int(os.environ.get("RANK", "0")) if arguments.rank is None else arguments.rank
        world = int(os.environ.get("WORLD_SIZE", "1")) if arguments.world is None else arguments.world
    except ValueError as error:
        raise DataError(f"RANK and WORLD_SIZE are not numbers ({error}); correct or unset them") from error
    if not 0 <= rank < world:
        raise DataError(f"--rank {rank} is not between 0 and --world {world} - 1; correct one of them")
    device = arguments.device
    if device is None:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = f"cuda:{local % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    return rank, world, device


def _bar(console: Console, shown: bool) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not shown)


def _report(arguments: argparse.Namespace, counts: Counts, total: int, rank: int, world: int) -> None:
    padding = 1 - counts.tokens / counts.padded if counts.padded else 0.0
    table = Table(show_header=False, box=None)
    for name, value in (
        ("store", arguments.store),
        ("rows", f"{total:,}" + (f" of process {rank} of {world}" if world > 1 else "")),
        ("extracted", f"{counts.done:,} documents, {counts.tokens:,} tokens, {padding:.1%} padding"),
        ("in the store before", f"{counts.kept:,}"),
        (
            "dropped",
            f"{counts.dropped:,} with fewer than {MIN_RESPONSE} response tokens in {arguments.max_length} tokens",
        ),
        ("speed", f"{counts.rate:,.0f} tokens/s"),
    ):
        table.add_row(name, value)
    Console().print(table, highlight=False)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="eagle-plugin data features",
        description="Run the target over token rows and store what a draft head learns from: its aux hidden states\n"
        "and its last hidden state of every token.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", metavar="ROWS", help="token rows (JSON lines) of `data generate` or `data render`")
    parser.add_argument("--target", required=True, metavar="DIR", help="folder of the target")
    parser.add_argument("--store", required=True, metavar="URL", help="folder, s3://, gs:// or az:// URL to write to")
    parser.add_argument(
        "--aux-layers",
        metavar="IDS",
        help="layers whose input is stored, such as 2,15,27, or none for an EAGLE-2 head (default: 2, L/2, L-3)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="the target computes in it (bfloat16)")
    parser.add_argument("--max-length", type=_positive, default=2048, metavar="N", help="tokens a row is cut to (2048)")
    parser.add_argument(
        "--batch-tokens", type=_positive, default=4096, metavar="N", help="tokens of a batch, with padding (4096)"
    )
    parser.add_argument("--shard-mib", type=_positive, default=SHARD_BYTES >> 20, metavar="N", help="shard size (256)")
    parser.add_argument(
        "--rank", type=int, metavar="R", help="this process takes row R, R + W, ... (default: torchrun's)"
    )
    parser.add_argument("--world", type=int, metavar="W", help="number of processes (default: torchrun's, or 1)")
    parser.add_argument("--allow-odd-masks", action="store_true", help="accept rows that are nearly all or no response")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DataError as refusal:
        sys.exit(f"error: {refusal}")
