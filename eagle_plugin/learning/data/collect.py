"""`eagle-plugin data collect`: the target answers the prompts, and its servers store the hidden states meanwhile."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from eagle_plugin.common.atomic_io import inherit_privacy
from eagle_plugin.common.command_line import Parser, positive_number
from eagle_plugin.learning.data.collecting.command import complete, missing_line, store_table
from eagle_plugin.learning.data.collecting.completion import PATIENCE_S, GrowingStore
from eagle_plugin.learning.data.generation.journal import Journal
from eagle_plugin.learning.data.generation.options import add_request_options, check_temperatures
from eagle_plugin.learning.data.generation.run import GenerationSettings, generate
from eagle_plugin.learning.data.generation.summary import cut_answers, summary_table
from eagle_plugin.learning.data.provenance import carry_sources
from eagle_plugin.learning.data.rows import read_rows
from eagle_plugin.models import target_folder

EXAMPLES = """\
examples:
  EAGLE_FEATURES=/data/features vllm serve TARGET --speculative-config '{"method": "eagle3", "model": "HEAD", ...}'
  eagle-plugin data collect prompts.jsonl --endpoint http://127.0.0.1:8000 --target TARGET \\
      --store /data/features --out rows.jsonl

After an interruption, or if documents are missing at the end, run the same command again: finished prompts are not
asked again, and answers whose states are not in the store are sent as prompts. --out has the answers as token rows,
which `eagle-plugin data vocabulary` reads. The servers and this command must see the same store. EAGLE_API_KEY, or else
OPENAI_API_KEY, is the key for servers that want one.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Collect; returns 1 if a prompt failed, or documents are missing, and the command must be run again."""
    options = _parse(argv)
    console = Console(stderr=True)
    target = target_folder(options.target)
    settings = GenerationSettings(
        max_tokens=options.max_tokens,
        temperatures=options.temperature,
        concurrency=options.concurrency,
        timeout_s=options.timeout,
        model=options.model,
        collects=True,
        drafts=not options.no_drafts,
    )
    store = GrowingStore(options.store, target)
    with inherit_privacy(options.prompts), Journal(options.out) as journal:
        carry_sources(options.prompts, options.out)
        stats, endpoints = asyncio.run(generate(options.prompts, options.endpoint, journal, settings, console))
        Console().print(summary_table(stats, endpoints, journal))
        if warning := cut_answers(stats, options.max_tokens):
            console.print(f"[yellow]warning:[/] {warning}", highlight=False, soft_wrap=True)
        store.add_sources(options.out)
        rows = partial(read_rows, options.out)
        found = complete(store, rows, options.endpoint, settings, options.patience, console)
    Console().print(store_table(store, found), highlight=False)
    if stats.postponed:
        console.print(f"{stats.postponed} prompts failed for now; run the same command again to ask them again")
    if found.missing:
        console.print(missing_line(store, found), highlight=False)
    return 1 if stats.postponed or found.missing else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="eagle-plugin data collect",
        description="Let the target answer the prompts, and its servers store what a draft head learns from:\n"
        "`data generate` and `data features` in one pass. The servers have the plugin and EAGLE_FEATURES=STORE.",
        epilog=EXAMPLES,
    )
    parser.add_argument("prompts", type=Path, help="JSON lines of `eagle-plugin data prepare` or `data builtin`")
    parser.add_argument(
        "--endpoint", action="append", required=True, metavar="URL", help="a server of the target; repeat it for more"
    )
    parser.add_argument("--target", required=True, metavar="DIR", help="folder of the target, or a name")
    parser.add_argument("--store", required=True, metavar="URL", help="the store that the servers write to")
    parser.add_argument("--out", type=Path, required=True, help="file of token rows; an existing file is continued")
    add_request_options(parser)
    parser.add_argument("--max-tokens", type=positive_number, default=192, help="per answer (default: %(default)s)")
    parser.add_argument(
        "--concurrency", type=positive_number, default=64, help="requests in flight per endpoint (%(default)s)"
    )
    parser.add_argument("--no-drafts", action="store_true", help="plain rounds, for a server with an untrained head")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="SECONDS",
        help="without new documents, after which missing ones are asked for again (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    check_temperatures(parser, options)
    return options
