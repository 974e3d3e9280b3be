"""What the commands share on their way from and to a terminal: a parser with errors of one line, and small tables."""

from __future__ import annotations

import argparse
import math
from typing import Any, NoReturn

PORTS = range(1, 65536)


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line, an option has its full name only, and description and epilog stay as written.

    With abbreviations, an option that a command does not have can be taken for another one that it has, such as --data
    for --dataset.
    """

    def __init__(self, **options: Any) -> None:
        own: dict[str, Any] = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**(own | options))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see `{self.prog} --help`\n")


def port_number(text: str) -> int:
    """The TCP port of an option, for the `type` of `add_argument`."""
    if not (text.isdecimal() and int(text) in PORTS):
        raise argparse.ArgumentTypeError(f"{text} is no TCP port, wanted {PORTS[0]} to {PORTS[-1]}")
    return int(text)


def positive_number(text: str) -> int:
    """A whole number of 1 or more, for the `type` of `add_argument`."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def positive_real(text: str, what: str = "number") -> float:
    """A finite number above 0, for the `type` of `add_argument`; what: it is, in the error."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a {what} above 0")
    return value


def print_table(*rows: tuple[str, Any]) -> None:
    """Print names and values in two columns."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
