"""`eagle-plugin new-head`: an untrained draft head, with which a server can store hidden states."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from eagle_plugin.common.command_line import Parser
from eagle_plugin.heads.create import new_head
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.models import target_folder

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
KINDS = ("auto", "eagle3", "eagle2")
EXAMPLES = """\
examples:
  eagle-plugin new-head models/llama out/untrained
  EAGLE_FEATURES=/data/features vllm serve models/llama \\
      --speculative-config '{"method": "eagle3", "model": "out/untrained", "num_speculative_tokens": 4}'
  eagle-plugin data collect prompts.jsonl --no-drafts ...

Its drafts are rarely accepted: ask for none. It says which layers' states the server keeps (--aux-layers).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the head; returns 0.

    Raises:
        HeadError: the options do not fit the target.
    """
    arguments = _parse(argv)
    target = target_folder(arguments.target)
    head = new_head(arguments.kind, target, aux_layers=_layers(arguments.aux_layers))
    save_head(head, arguments.out, target_dir=target, manifest={}, dtype=DTYPES[arguments.dtype])
    print(f"an untrained head is in {arguments.out}")
    return 0


def _layers(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise HeadError(f"--aux-layers {text} is no list of numbers such as 2,15,27; correct it") from None


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="eagle-plugin new-head",
        description="Write an untrained draft head for a target: `data collect` needs a server with a head.",
        epilog=EXAMPLES,
    )
    parser.add_argument("target", metavar="TARGET", help="folder of the target, or a name of `models list`")
    parser.add_argument("out", metavar="OUT", help="folder of the head")
    parser.add_argument("--kind", choices=KINDS, default="auto", help="(default: EAGLE-3 where it can be served)")
    parser.add_argument("--aux-layers", metavar="IDS", help="layers whose input is stored (default: 2, L/2, L-3)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the head's weights (%(default)s)")
    return parser.parse_args(argv)
