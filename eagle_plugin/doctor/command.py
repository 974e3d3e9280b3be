"""Runs `eagle-plugin doctor`: who would serve this start command, at what cost, and which flag prevents it."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from eagle_plugin.common.command_line import Parser
from eagle_plugin.doctor.engine_answer import ask
from eagle_plugin.doctor.environment import look
from eagle_plugin.doctor.start_command import read_command
from eagle_plugin.runtime.verdict import Cost, Verdict

DESCRIPTION = """\
Say who would serve a start command: the plugin's worker, the engine's own
speculation, or plain decoding; why, in the words of the server's log; what it
takes in memory; and what to change. No server is started, no model is loaded.

The engine's own parser reads the flags, in the environment of the command: the
one of its program and of NAME=VALUE before it. A model of a hub is looked up
as the engine does it, and on a GPU that the plugin serves the kernels may be
tested as at a start.

Without a command: what is known of this environment.
"""
EXAMPLES = """\
examples:
  eagle-plugin doctor
  eagle-plugin doctor -- vllm serve MODEL --speculative-config '{"method": "eagle3", "model": "HEAD",
      "num_speculative_tokens": 5}'
  eagle-plugin doctor --json -- EAGLE_PLUGIN=force sglang serve MODEL --speculative-algorithm EAGLE3
      --speculative-draft-model-path HEAD

The exit code is 0 if the plugin would serve, 1 if the engine would without it, 2 if the command would start no server.
"""
CODES = {"plugin": 0, "engine": 1, "plain": 1, "nobody": 2}
WHO = {
    "plugin": "the plugin's worker",
    "engine": "the engine, without the plugin",
    "plain": "the engine, by plain decoding",
    "nobody": "nobody: the server would not start",
}
WIDTH = 110


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = _parse(argv)
    start = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not start:
        return _environment(arguments.json)
    command = read_command(start)
    verdict = ask(command)
    code = CODES[verdict.serves]
    if arguments.json:
        python = {"python": str(command.python), "arguments": command.arguments, "environment": command.environment}
        print(json.dumps({"exit_code": code, **asdict(verdict), "command": python}, indent=2))
    else:
        _print(_rows(verdict, str(command.python)))
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="eagle-plugin doctor", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command that starts your server; -- before it"
    )
    return parser.parse_args(argv)


def _environment(as_json: bool) -> int:
    findings, is_active = look()
    code = 0 if is_active else 1
    if as_json:
        print(json.dumps({"exit_code": code, "findings": [found._asdict() for found in findings]}, indent=2))
    else:
        _print((found.name, ("! " if found.is_fault else "") + found.text) for found in findings)
    return code


def _rows(verdict: Verdict, python: str) -> Iterator[tuple[str, str]]:
    yield "engine", f"{verdict.engine} {verdict.version}".rstrip() + f", {python}"
    yield "plugin", verdict.plugin
    yield "serves", WHO[verdict.serves]
    yield "because" if verdict.serves != "plugin" else "log", verdict.sentence
    for name, lines in (("warning", verdict.warnings), ("change", verdict.changes), ("open", verdict.open)):
        for line in lines:
            yield name, line
    for cost in verdict.memory:
        yield "memory", _text(cost)


def _text(cost: Cost) -> str:
    size = "not known before the start" if cost.bytes is None else _size(cost.bytes)
    return f"{cost.what}: {size}" + (f" ({cost.note})" if cost.note else "")


def _size(count: int) -> str:
    """A number of bytes in the unit that gives it three digits at most."""
    value: float = count
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1000 or unit == "GiB":
            break
        value /= 1024
    return f"{count:,} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def _print(rows: Any) -> None:
    """Two columns, the second one wrapped; a name that repeats is printed once."""
    rows = list(rows)
    left, before = max(len(name) for name, _ in rows) + 2, ""
    for name, text in rows:
        shown = "" if name == before else name
        lines = textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False) or [""]
        print(f"{shown:<{left}}{lines[0]}")
        for line in lines[1:]:
            print(" " * left + line)
        before = name
