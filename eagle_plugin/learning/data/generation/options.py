"""What `data generate` and `data collect` let their user say of the requests."""

from __future__ import annotations

import argparse
import math


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """--model, --temperature and --timeout."""
    parser.add_argument("--model", default="", help="the name of the target on the servers (default: the first)")
    parser.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        help="assign one of these to each prompt (default: each prompt's own, and 0 or 1 for those without one)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="per request, which is asked once more if it takes longer (default: 600, or --max-tokens / 10 if more)",
    )


def check_temperatures(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the command with a sentence where one of --temperature is none."""
    for temperature in options.temperature or ():
        if not 0 <= temperature < math.inf:
            parser.error(f"--temperature is {temperature}, wanted a number of at least 0")
