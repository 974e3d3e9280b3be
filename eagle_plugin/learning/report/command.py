"""`eagle-plugin report`: the page of a benchmark, as HTML and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle_plugin.common.command_line import Parser
from eagle_plugin.learning.report.page import write_report

DESCRIPTION = """\
Write DIR/report.html and DIR/report.md from DIR/states.json, which
`eagle-plugin benchmark` wrote. The page needs no other file, no network and no
script; it has no text of a prompt or of an answer.
"""
EPILOG = """\
examples:
  eagle-plugin report out/benchmark
  eagle-plugin report out/benchmark --curve out/head/train/base/logs/curve.json --eval out/head/eval-details.json

Without --curve and --eval the page has what is found below DIR: curve.json, logs/curve.json or train/*/logs/curve.json,
and heads-details.json, eval-details.json or eval/heads.json. What is not there is left out.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and print its path; returns 0, raises UserError for anything refused."""
    parser = Parser(
        prog="eagle-plugin report",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder with states.json")
    parser.add_argument("--curve", type=Path, metavar="FILE", help="the learning curve, logs/curve.json of `train`")
    parser.add_argument("--eval", type=Path, metavar="FILE", help="FILE-details.json of `eagle-plugin eval --json`")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of both files (the folder with states.json)")
    options = parser.parse_args(argv)
    for path in write_report(options.folder, options.curve, options.eval, options.out):
        print(path)
    return 0
