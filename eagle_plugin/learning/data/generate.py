"""`eagle-plugin data generate`: the target answers the prompts, and its answers become token rows to train on."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from eagle_plugin.common.atomic_io import inherit_privacy
from eagle_plugin.common.command_line import Parser
from eagle_plugin.learning.data.generation.journal import Journal
from eagle_plugin.learning.data.generation.options import add_request_options, check_temperatures
from eagle_plugin.learning.data.generation.run import GenerationSettings, generate
from eagle_plugin.learning.data.generation.summary import cut_answers, summary_table
from eagle_plugin.learning.data.privacy.phones import PHONE_REGIONS, PHONE_REGIONS_HELP, parse_regions
from eagle_plugin.learning.data.privacy.scanner import Scanner
from eagle_plugin.learning.data.provenance import carry_sources

EXAMPLES = """\
examples:
  eagle-plugin serve --plain --target TARGET --port 30000 --concurrency 64     a server to ask, or one of your own
  eagle-plugin data generate prompts.jsonl --endpoint http://127.0.0.1:30000 --out rows.jsonl
  eagle-plugin data generate prompts.jsonl --endpoint http://a:30000 --endpoint http://b:30000 --out rows.jsonl

After an interruption, run the same command again: finished prompts are not asked again. Prompts that gave no row are in
rows.skipped.jsonl with the reason; remove a line to have its prompt asked again. Without --temperature a prompt is
answered at the temperature of its own request, or at 0 or 1 if it has none. Prompts of one temperature are asked
together, because servers are slower on batches that mix greedy and sampled requests. EAGLE_API_KEY, or else
OPENAI_API_KEY, is the key for servers that want one. A rate limit is waited for.
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = Parser(
        prog="eagle-plugin data generate",
        description="Let the target answer the prompts and write its answers, as token ids, to train a head on.",
        epilog=EXAMPLES,
    )
    parser.add_argument("prompts", type=Path, help="JSON lines of `eagle-plugin data prepare` or `data builtin`")
    parser.add_argument(
        "--endpoint",
        action="append",
        required=True,
        metavar="URL",
        help="an SGLang or vLLM server of the target; repeat it for several servers",
    )
    parser.add_argument("--out", type=Path, required=True, help="file of rows; an existing file is continued")
    add_request_options(parser)
    parser.add_argument("--max-tokens", type=int, default=192, help="per answer (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight per endpoint (%(default)s)")
    parser.add_argument("--privacy-scan", action="store_true", help="drop answers that contain private data")
    parser.add_argument("--phone-regions", default=",".join(PHONE_REGIONS), metavar="CODES", help=PHONE_REGIONS_HELP)
    options = parser.parse_args(argv)
    for name in ("max_tokens", "concurrency", "timeout"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}, wanted at least 1")
    check_temperatures(parser, options)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Generate rows for the prompts that have none; returns 1 if a prompt failed and must be asked again."""
    options = parse(argv)
    console = Console(stderr=True)
    settings = GenerationSettings(
        max_tokens=options.max_tokens,
        temperatures=options.temperature,
        concurrency=options.concurrency,
        timeout_s=options.timeout,
        model=options.model,
        is_private=_load_scan(parse_regions(options.phone_regions)) if options.privacy_scan else None,
    )
    with inherit_privacy(options.prompts), Journal(options.out) as journal:
        carry_sources(options.prompts, options.out)
        stats, endpoints = asyncio.run(generate(options.prompts, options.endpoint, journal, settings, console))
        Console().print(summary_table(stats, endpoints, journal))
    if warning := cut_answers(stats, options.max_tokens):
        console.print(f"[yellow]warning:[/] {warning}", highlight=False, soft_wrap=True)
    if stats.postponed:
        console.print(f"{stats.postponed} prompts failed for now; run the same command again to ask them again")
    return 1 if stats.postponed else 0


def _load_scan(phone_regions: tuple[str, ...]) -> Callable[[str], bool]:
    # Loaded now: a missing package or an unknown region is an error at the start, not at the first answer.
    return Scanner(phone_regions=phone_regions).scan
