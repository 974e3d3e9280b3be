"""Runs `eagle-plugin selftest`: what a server tests at its first start on a GPU, by hand and on any device."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eagle_plugin.common.command_line import Parser
from eagle_plugin.common.devices import check_device
from eagle_plugin.common.errors import UserError
from eagle_plugin.kernels import loader
from eagle_plugin.selftest import record, suite
from eagle_plugin.selftest.failure import NO_MEMORY
from eagle_plugin.selftest.record import Record
from eagle_plugin.selftest.shapes import ModelShape, as_text
from eagle_plugin.selftest.suite import Report

DESCRIPTION = """\
Run every kernel of the plugin on random inputs of a model's shapes and compare
it with a short oracle in torch, then capture a round of a toy model as a graph
and compare its replays with the round as it is.

A server on a GPU does this by itself before its first request, once per
device, driver, version of torch, Triton and plugin, and model shape. If
anything differs, the engine's own speculative worker serves, and the log says
what differed by how much.
"""
EXAMPLES = """\
examples:
  eagle-plugin selftest                      on the GPU if there is one, with the shapes of Llama-3.1-8B
  eagle-plugin selftest --device cpu         the kernels for a CPU; graphs are emulated there
  eagle-plugin selftest --model-shape heads=14,kv_heads=2,head_dim=64,vocabulary=151936,draft_vocabulary=32000
  eagle-plugin selftest --again              forget what was found before, by servers too, and test anew

The exit code is 0 if nothing differs, 1 if something does, 2 if the test could not be made. What was found is kept in
the folder selftest of EAGLE_CACHE_DIR (default ~/.cache/eagle-plugin). A server whose model failed stays with the
engine's own worker until --again removes that record.
"""


class IncompleteError(UserError):
    """Some checks ran out of memory, and none of the others failed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = _parse(argv)
    device = check_device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = ModelShape.parse(arguments.model_shape)
    record.check_writable()
    if arguments.again:
        record.forget()
    key = record.key_of("command", device, as_text(model), "")
    kept, report = record.read(key), None
    if kept is None:
        with Console(stderr=True).status("starting") as status:
            report = suite.run(device, model, lambda name: status.update(name))
        if report.left_out and not report.reasons:
            raise IncompleteError(
                f"the self-test is not complete on {key['device']}: {'; '.join(report.left_out)}; end what else uses "
                "the device, and run it again"
            )
        kept = record.write(key, report.reasons, report.seconds)
    if arguments.json:
        print(json.dumps(_as_json(key, kept, report), indent=1))
    else:
        _print(device, kept, report)
    if kept.passed:
        return 0
    print(f"the self-test failed on {key['device']}: {'; '.join(kept.reasons)}", file=sys.stderr)
    return 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="eagle-plugin selftest", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
    parser.add_argument(
        "--model-shape",
        default="",
        metavar="NAME=VALUE,...",
        help="sizes that are not those of Llama-3.1-8B: "
        + ", ".join(f"{k}={v}" for k, v in as_text(ModelShape()).items()),
    )
    parser.add_argument("--again", action="store_true", help="forget all records and run the test anew")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    return parser.parse_args(argv)


def _as_json(key: dict[str, Any], kept: Record, report: Report | None) -> dict[str, Any]:
    checks = report.findings if report else []
    return {
        "passed": kept.passed,
        "reasons": kept.reasons,
        "date": kept.date,
        "seconds": round(kept.seconds, 2),
        "from_record": report is None,
        "key": key,
        "checks": [finding._asdict() for finding in checks],
    }


def _print(device: str, kept: Record, report: Report | None) -> None:
    console = Console()
    if report is None:
        result = "passed" if kept.passed else "failed"
        console.print(f"{result} on {kept.date} in {kept.seconds:.1f} s; --again runs it anew", highlight=False)
        return
    kernels = loader.backend(torch.device(device).type)
    table = Table(
        "check", "values", "largest difference", "seconds", "result", title=f"self-test on {device}, {kernels} kernels"
    )
    for finding in report.findings:
        table.add_row(
            finding.check,
            f"{finding.compared:,}",
            f"{finding.worst:.0%} of what is allowed" if finding.worst else "equal",
            f"{finding.seconds:.2f}",
            NO_MEMORY if finding.ran_out else escape("; ".join(finding.differences[:3])) or "[green]passed[/green]",
            style="bold red" if finding.differences else "",
        )
    console.print(table)
    console.print(f"{report.seconds:.1f} s", highlight=False)
