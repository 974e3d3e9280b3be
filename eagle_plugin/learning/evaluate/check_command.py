"""`eagle-plugin check`: does a draft head fit its target, and are its drafts accepted?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.command_end import importing
from eagle_plugin.common.command_line import Parser, print_table
from eagle_plugin.common.progress import progress_bar
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.files import read_config
from eagle_plugin.heads.kinds import stored_algorithm
from eagle_plugin.models import head_folder, target_folder

DESCRIPTION = """\
Compare names, shapes, aux layers, vocabulary tables and digests, then draft a few responses of the target. A head with
tensors of the right shape is refused with the reason if it was trained for another target or its aux layers are wrong.
Runs without an engine.
"""
# The answers are of 96 tokens, and rotary positions of another base differ little over so few.
NOT_SEEN = "a rope_theta other than in training: drafts of answers as short as these change little"


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table of what was found; raises UserError for a head that does not fit."""
    arguments = _parse(argv)
    target, head = target_folder(arguments.target), head_folder(arguments.head)
    algorithm = arguments.algorithm
    if arguments.files_only:
        info = check_head(target, head, algorithm=algorithm or stored_algorithm(read_config(head)))
        warnings, drafts, measured = list(info.warnings), "not measured (--files-only)", {}
    else:
        with importing():
            from eagle_plugin.learning.evaluate.check import PROMPTS, check

        with progress_bar() as progress:
            report = check(
                target, head, algorithm=algorithm, report=lambda done: progress("answers", done / len(PROMPTS))
            )
        info, warnings, stats = report.info, report.warnings, report.served.stats
        drafts = f"first draft right for {stats.cumulative[0]:.1%}, accept length {stats.accept_length:.2f}"
        measured = stats.to_json() | {"trained_acceptance": report.trained}
        if report.trained is not None:
            drafts += f" (in training {report.trained:.1%})"
    layers = ", ".join(map(str, info.aux_layer_ids)) or "none"
    print_table(
        ("head", head),
        ("target", target),
        ("kind", info.kind),
        ("fits", f"--speculative-algorithm {info.algorithm}"),
        ("architecture", f"{info.architecture}, {info.num_layers} layer(s), hidden size {info.hidden_size}"),
        ("vocabulary", f"{info.draft_vocab_size:,} of {info.vocab_size:,} tokens"),
        ("aux hidden states", f"inputs of target layers {layers}"),
        ("weights", f"{info.parameters / 1e6:.1f} M parameters, {info.dtype}, {info.bytes / 2**20:.1f} MiB"),
        ("drafts", drafts),
        *([("not seen", NOT_SEEN)] if measured else []),
    )
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if arguments.json:
        found = {"kind": info.kind, "aux_layers": info.aux_layer_ids, **measured, "warnings": warnings}
        write_output(arguments.json, [json.dumps(found, indent=1), "\n"], "name another file with --json")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="eagle-plugin check", description=DESCRIPTION)
    parser.add_argument("target", metavar="TARGET", help="folder of the target, or a name of `models list`")
    parser.add_argument("head", metavar="HEAD", help="folder of the draft head, or its name in `models list`")
    parser.add_argument(
        "--algorithm",
        choices=("EAGLE", "EAGLE3"),
        help="the engine's --speculative-algorithm (default: the head's own)",
    )
    parser.add_argument(
        "--files-only", action="store_true", help="check the files only; do not run the target and the head"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured to this file")
    return parser.parse_args(argv)
