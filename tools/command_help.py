"""The parsers of every command of eagle-plugin, and their help as one page of Markdown."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from eagle_plugin import cli
from eagle_plugin.learning.jobs.jobs_command import ACTIONS


class _Asked(BaseException):
    """A parser was asked to parse; not an Exception, so that no command turns it into a message."""


def stopped_at_parsing(run: Callable[[], Any], parse: bool) -> argparse.ArgumentParser | None:
    """Run a command up to the end of its parsing; returns the parser, or None if the command asked for none.

    parse: whether the arguments are read, with SystemExit for wrong ones; otherwise the parser is only found. A check
    that the command makes after parsing is not made.
    """
    original = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        if parse:
            original(self, args, namespace)
        raise _Asked(self)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args):
        try:
            run()
        except _Asked as asked:
            return asked.args[0]
    return None


def run_command(args: Sequence[str]) -> Any:
    """What `eagle-plugin ARGS` runs, without the handling of errors around it."""
    return cli._run_command(list(args))


def all_parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """(name, parser) of every command that does something, in the order of `eagle-plugin --help`."""
    for name, parser in _choices(cli._parser()).items():
        if name == "data":
            for step in _choices(parser):
                yield f"data {step}", _own_parser(["data", step])
        elif name in cli.OWN_PARSERS:
            own = _own_parser([name])
            if not _choices(own):
                yield name, own
            actions = _own_parser([name, next(iter(ACTIONS))]) if name == "optimize" else own
            yield from ((f"{name} {action}", parser) for action, parser in _choices(actions).items())
        elif _choices(parser):
            yield from ((f"{name} {action}", parser) for action, parser in _choices(parser).items())
        else:
            yield name, parser


def _own_parser(args: Sequence[str]) -> argparse.ArgumentParser:
    parser = stopped_at_parsing(lambda: run_command(args), parse=False)
    assert parser is not None, args
    return parser


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The sub-commands of a parser by name; one without a description gets its line of help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for name, choice in action.choices.items():
                choice.description = choice.description or helps.get(name)
            return dict(action.choices)
    return {}


def all_help() -> str:
    """A section per command: what it does, its usage, a table of its arguments, and its examples."""
    with _wide():
        epilogs = [""]  # actions of one command may have the same
        sections = []
        for name, parser in all_parsers():
            sections.append(_section(name, parser, epilogs))
        return "\n".join(sections)


@contextlib.contextmanager
def _wide() -> Iterator[None]:
    """Usage is wrapped at 100 columns, whatever the terminal has."""
    with mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}):
        yield


def _section(name: str, parser: argparse.ArgumentParser, epilogs: list[str]) -> str:
    usage = textwrap.dedent(f"       {parser.format_usage().removeprefix('usage: ')}").strip()
    lines = [f"## eagle-plugin {name}", ""]
    for paragraph in (parser.description or "").split("\n\n"):
        lines += [_prose(paragraph.replace("%(prog)s", parser.prog)), ""]
    lines += ["```text", usage, "```", ""]
    if rows := [row for action in parser._actions if (row := _row(parser, action))]:
        lines += ["| argument | |", "|---|---|", *rows, ""]
    if (epilog := (parser.epilog or "").strip("\n")) not in epilogs:
        lines += ["```text", epilog, "```", ""]
        epilogs.append(epilog)
    return "\n".join(lines)


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
        return ""
    formatter = parser._get_formatter()
    spelled = formatter._format_action_invocation(action)
    text = formatter._expand_help(action) if action.help else ""
    return f"| `{spelled}` | {_prose(text)} |"


def _prose(text: str) -> str:
    """A paragraph of help as Markdown of one line: its backticks stay, every other character means itself."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if n % 2 else _escape(part) for n, part in enumerate(parts))


def _escape(text: str) -> str:
    return re.sub(r"([\\*_\[\]|#])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))


if __name__ == "__main__":
    sys.stdout.write(all_help())
