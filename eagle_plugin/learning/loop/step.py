"""Runs one step of the loop that is no sub-command of eagle-plugin, as a stage of a job."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from pydantic import validate_call
from rich.console import Console

from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.learning.loop.exchange import exchange_head
from eagle_plugin.learning.loop.prompts import choose_prompts
from eagle_plugin.learning.loop.summary import summarise
from eagle_plugin.learning.loop.traffic import record_traffic

STEPS: dict[str, Callable[..., None]] = {
    "prompts": choose_prompts,
    "traffic": record_traffic,
    "exchange": exchange_head,
    "summary": summarise,
}


def main(name: str, values: str) -> int:
    """Run the step `name`; values: its arguments, as JSON. Returns the exit status."""

    def run() -> int:
        validate_call(STEPS[name])(**json.loads(values))
        return 0

    return exit_status(name, Console(stderr=True), run)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
