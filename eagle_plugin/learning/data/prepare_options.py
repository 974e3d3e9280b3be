"""The options of `eagle-plugin data prepare`."""

from __future__ import annotations

import argparse

from eagle_plugin.common.command_line import Parser
from eagle_plugin.learning.data.privacy.phones import PHONE_REGIONS, PHONE_REGIONS_HELP
from eagle_plugin.learning.data.privacy.redact import MODES
from eagle_plugin.learning.data.provenance import add_terms_options

EXAMPLES = """\
formats (detected from the first 20 records, which must agree; JSON lines, .gz, .zst, a JSON array or Parquet):
  ShareGPT            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
  OpenAI chat         {"messages": [{"role": "user", "content": "Hi"}]}
  OpenAI batch        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ...}}
                      {"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": {"input": "Hi"}}
  OpenAI completions  {"prompt": "Once upon a time"}
  SageMaker capture   {"captureData": {"endpointInput": {"data": "...", "encoding": "BASE64"}, ...}, ...}
  plugin capture      {"v": 1, "id": "...", "request": {"messages": ...}, "response": {...}}

examples:
  eagle-plugin data prepare chats.json --out prompts.jsonl
  eagle-plugin data prepare capture/*.jsonl.gz --privacy redact --keep-responses --out prompts.jsonl
  eagle-plugin data prepare capture/*.jsonl.gz --skip-broken --out prompts.jsonl
  eagle-plugin data prepare traffic.jsonl --keep-responses --target TARGET --out prompts.jsonl
  zcat big.gz | eagle-plugin data prepare - --privacy off --out prompts.jsonl
  PYTHONPATH=. eagle-plugin data prepare chats.json --recogniser my_names:find --out prompts.jsonl

Recorded answers are removed, because a draft head should learn from answers of its own target (`eagle-plugin data
generate`). --keep-responses keeps them, for `eagle-plugin data render`; then --target refuses captured answers of
another target. Names of persons are found only by a recogniser of yours: a function from a text to (type, start, end)
triples.
"""


def prepare_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = Parser(
        prog="eagle-plugin data prepare",
        description="Turn files of prompts into one file of prompts: normalised, filtered, without duplicates, split.",
        epilog=EXAMPLES,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="files of prompts; - is stdin")
    parser.add_argument("--out", required=True, metavar="FILE", help="the JSON-lines file to write")
    parser.add_argument(
        "--privacy",
        choices=MODES,
        default="drop",
        help="what happens to prompts with private data (default: drop)",
    )
    parser.add_argument(
        "--recogniser", metavar="MODULE:FUNCTION", help="a function of yours that finds more types, such as names"
    )
    parser.add_argument("--phone-regions", default=",".join(PHONE_REGIONS), metavar="CODES", help=PHONE_REGIONS_HELP)
    parser.add_argument("--tokenizer", metavar="TARGET", help="folder or name of the target: decodes token ids")
    parser.add_argument("--workers", type=int, metavar="N", help="processes of the filter (default: one per core)")
    parser.add_argument(
        "--val-share", type=float, default=0.02, metavar="SHARE", help="share of the prompts held out (default: 0.02)"
    )
    parser.add_argument("--keep-responses", action="store_true", help="keep the recorded answers")
    parser.add_argument("--target", metavar="TARGET", help="folder or name: refuse captured answers of another target")
    parser.add_argument("--skip-other-targets", action="store_true", help="leave them out and count them instead")
    parser.add_argument(
        "--skip-broken", action="store_true", help="leave out and count broken lines (default: refuse the file)"
    )
    parser.add_argument("--source", metavar="NAME", help="name of these prompts in evaluation (default: their format)")
    parser.add_argument("--license", metavar="ID", help="of files that have no FILE.source.json")
    parser.add_argument(
        "--forbids-training", action="store_true", help="the terms of these files forbid to train other models on them"
    )
    add_terms_options(parser)
    return parser
