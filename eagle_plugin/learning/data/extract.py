"""`eagle-plugin data features`: run the target over token rows and store its hidden states.

torchrun starts one process per GPU: `torchrun --nproc-per-node 8 -m eagle_plugin.learning.data.extract ...`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from eagle_plugin.collect.settings import FORMS
from eagle_plugin.common.allocator import reuse_memory
from eagle_plugin.common.atomic_io import inherit_privacy
from eagle_plugin.common.command_end import end_of
from eagle_plugin.common.command_line import Parser, positive_number
from eagle_plugin.common.device_memory import naming_lack
from eagle_plugin.common.devices import check_device, fast_dtype
from eagle_plugin.common.file_digests import hash_file
from eagle_plugin.common.progress import ProgressBars, report_progress
from eagle_plugin.common.url_credentials import without_credentials
from eagle_plugin.learning.data.collecting.command import complete, missing_line, store_table
from eagle_plugin.learning.data.collecting.completion import PATIENCE_S, GrowingStore
from eagle_plugin.learning.data.dialogues import read_dialogues
from eagle_plugin.learning.data.generation.run import GenerationSettings
from eagle_plugin.learning.data.rows import MIN_RESPONSE, DataError, TokenRow
from eagle_plugin.learning.data.store.extraction import (
    BATCH_TOKENS,
    MAX_LENGTH,
    ExtractionStats,
    extract,
    form_shards,
    select_rows,
    survey_rows,
)
from eagle_plugin.learning.data.store.feature_store import SHARD_BYTES, FeatureWriter
from eagle_plugin.learning.data.store.features import Taps, check_aux_layers, default_aux_layers, load_target
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.plan import Run
from eagle_plugin.learning.data.target_identity import target_digests
from eagle_plugin.models import target_folder

MIB = 1 << 20
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
EXAMPLES = """\
examples:
  eagle-plugin data features rows.jsonl --target models/llama --store features/
  eagle-plugin data features rows.jsonl --target models/llama --store s3://bucket/features --aux-layers 2,16,29
  eagle-plugin data features rows.jsonl --target models/llama --store /data/features --endpoint http://127.0.0.1:8000
  torchrun --nproc-per-node 8 -m eagle_plugin.learning.data.extract rows.jsonl --target models/llama --store /nvme/f

After an interruption, or if a shard is lost or damaged, run the same command again: it reads the shards that are
there, and extracts exactly the others. The result has the same bytes as that of a run without interruption. With
--endpoint, EAGLE_API_KEY, or else OPENAI_API_KEY, is the key for servers that want one.
Object stores take their settings from the environment: AWS_ENDPOINT, AWS_REGION, AWS_ACCESS_KEY_ID, ...
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 when every row of this rank is in the store."""
    arguments = _parse(argv)
    with inherit_privacy(arguments.rows):
        return _ask_servers(arguments) if arguments.endpoint else _extract(arguments)


def _ask_servers(arguments: argparse.Namespace) -> int:
    """Let servers of the target compute the states: each row is a prompt of theirs."""
    survey_rows(arguments.rows, arguments.max_length, allow_odd_masks=arguments.allow_odd_masks)
    console = Console(stderr=True)
    store = GrowingStore(arguments.store, target_folder(arguments.target))
    settings = GenerationSettings(concurrency=arguments.concurrency, collects=True)
    store.add_sources(Path(arguments.rows))
    rows = partial(read_dialogues, arguments.rows, store.manifest.max_length)
    found = complete(store, rows, arguments.endpoint, settings, PATIENCE_S, console, given=True)
    Console().print(store_table(store, found), highlight=False)
    if found.missing:
        console.print(missing_line(store, found), highlight=False)
    return 1 if found.missing else 0


def _extract(arguments: argparse.Namespace) -> int:
    reuse_memory()
    rank, world, device = _find_place(arguments)
    arguments.dtype = arguments.dtype or fast_dtype(device)
    arguments.target = target_folder(arguments.target)
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
            states=arguments.states,
            max_length=arguments.max_length,
            logit_factor=taps.readout.factor,
            softcap=taps.readout.softcap,
        )
        run = Run.of(
            hash_file(Path(arguments.rows)),
            rank,
            world,
            max_length=arguments.max_length,
            batch_tokens=arguments.batch_tokens,
            shard_mib=arguments.shard_mib,
        )
        with FeatureWriter(arguments.store, manifest, run) as writer, _bar(console, shown=rank == 0) as bar:
            writer.plan(
                [row.id for batch in shard for row in batch]
                for shard in _shards(arguments, manifest, run, writer.earlier, ExtractionStats())
            )
            if rank == 0:
                writer.add_sources(arguments.rows)
            _verify(writer, bar, quickly=arguments.no_verify)
            task = bar.add_task("features", total=tokens, rate="")
            stats = ExtractionStats()
            shards = _shards(arguments, manifest, run, writer.earlier, stats)
            with naming_lack(device), closing(extract(taps, shards, writer, stats)) as batches:
                for _ in batches:
                    done = stats.tokens + stats.skipped_tokens
                    bar.update(task, completed=done, rate=f"{stats.rate:,.0f} tokens/s")
                    report_progress(done, tokens, "tokens")
    _report(arguments, stats, total, rank, world)
    return 0


def _shards(
    arguments: argparse.Namespace, manifest: Manifest, run: Run, earlier: set[str], stats: ExtractionStats
) -> Iterator[list[list[TokenRow]]]:
    """The batches of every shard of this process."""
    rows = read_dialogues(arguments.rows, arguments.max_length)
    own = (row for k, row in enumerate(rows) if k % run.world == run.rank)
    selected = select_rows(own, earlier, arguments.max_length, stats)
    return form_shards(selected, manifest, arguments.batch_tokens, arguments.shard_mib * MIB)


def _verify(writer: FeatureWriter, bar: ProgressBars, quickly: bool) -> None:
    """Read the shards that are there, and name those that are damaged and extracted again."""
    there = len(writer.names) - len(writer.missing - writer.damaged.keys())
    task = bar.add_task("checking the store", visible=there > 0 and not quickly, rate="")
    for done, total in () if quickly else writer.verify():
        bar.update(task, completed=done, total=total)
    for name, reason in sorted(writer.damaged.items()):
        bar.console.print(f"{name} {reason}; it is extracted again", highlight=False, soft_wrap=True)
    if there and bar.shown:
        left = f"{len(writer.missing):,} of {len(writer.names):,} shards are left to extract"
        bar.console.print(f"continuing: {left}", highlight=False)


def _aux_layers(text: str | None, num_layers: int) -> tuple[int, ...]:
    if text is None:
        return default_aux_layers(num_layers)
    if text == "none":
        return ()
    try:
        return check_aux_layers([int(part) for part in text.split(",")], num_layers)
    except ValueError as error:
        raise DataError(f"--aux-layers {text} is no list of numbers such as 2,15,27, nor none; correct it") from error


def _find_place(arguments: argparse.Namespace) -> tuple[int, int, str]:
    """(rank, number of processes, device) of this process, from the options or from torchrun's environment."""
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
    check_device(device)
    if (place := torch.device(device)).type == "cuda" and place.index is not None:
        torch.cuda.set_device(place)  # kernels that take "cuda" for their device would all use the first GPU
    return rank, world, device


def _bar(console: Console, shown: bool) -> ProgressBars:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return ProgressBars(*columns, console=console, shown=shown)


def _report(arguments: argparse.Namespace, stats: ExtractionStats, total: int, rank: int, world: int) -> None:
    padding = 1 - stats.tokens / stats.padded if stats.padded else 0.0
    table = Table(show_header=False, box=None)
    for name, value in (
        ("store", without_credentials(arguments.store)),
        ("documents", f"{total:,}" + (f" of process {rank} of {world}" if world > 1 else "")),
        ("extracted", f"{stats.done:,} documents, {stats.tokens:,} tokens, {padding:.1%} padding"),
        ("in the store before", f"{stats.kept:,}"),
        (
            "dropped",
            f"{stats.dropped:,} with fewer than {MIN_RESPONSE} response tokens in {arguments.max_length} tokens",
        ),
        ("speed", f"{stats.rate:,.0f} tokens/s"),
    ):
        table.add_row(name, value)
    Console().print(table, highlight=False)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="eagle-plugin data features",
        description="Run the target over token rows and store what a draft head learns from: for every token, the aux\n"
        "hidden states and the last hidden state of the target.",
        epilog=EXAMPLES,
    )
    parser.add_argument("rows", metavar="ROWS", help="token rows (JSON lines) of `data generate` or `data render`")
    parser.add_argument(
        "--target", required=True, metavar="DIR", help="folder of the target, or a name of `models list`"
    )
    parser.add_argument("--store", required=True, metavar="URL", help="folder, s3://, gs:// or az:// URL to write to")
    parser.add_argument(
        "--endpoint",
        action="append",
        metavar="URL",
        help="a server of the target with the plugin and EAGLE_FEATURES=STORE, which computes the states; repeat it "
        "for several. The options below are then the server's, but for --concurrency and --allow-odd-masks",
    )
    parser.add_argument(
        "--concurrency", type=positive_number, default=64, help="requests in flight per endpoint (%(default)s)"
    )
    parser.add_argument(
        "--aux-layers",
        metavar="IDS",
        help="layers whose input is stored, such as 2,15,27, or none for an EAGLE-2 head (default: 2, L/2, L-3)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the target (bfloat16; float32 on a CPU without instructions for bfloat16)"
    )
    parser.add_argument(
        "--states",
        choices=FORMS,
        default=FORMS[0],
        help="form of the stored states: float8, with a scale per token and layer, takes half the bytes (%(default)s)",
    )
    parser.add_argument(
        "--max-length",
        type=positive_number,
        default=MAX_LENGTH,
        metavar="N",
        help="tokens per row; more are cut (%(default)s)",
    )
    parser.add_argument(
        "--batch-tokens",
        type=positive_number,
        default=BATCH_TOKENS,
        metavar="N",
        help="tokens per batch, with padding (%(default)s)",
    )
    parser.add_argument(
        "--shard-mib", type=positive_number, default=SHARD_BYTES // MIB, metavar="N", help="MiB per shard (256)"
    )
    parser.add_argument(
        "--rank", type=int, metavar="R", help="this process takes row R, R + W, ... (default: torchrun's)"
    )
    parser.add_argument("--world", type=int, metavar="W", help="number of processes (default: torchrun's, or 1)")
    parser.add_argument(
        "--allow-odd-masks", action="store_true", help="accept rows that are nearly all response, or have none"
    )
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="when continuing, check only sizes and headers of the shards that are there, do not read them",
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
