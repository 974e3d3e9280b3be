"""Run one step of `make gpu` in this process, and write its result and what it keeps before its end:

python -m benchmarks.gpu.run_step NAME --device cuda --out FOLDER --identity JSON
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import NoReturn

from benchmarks.gpu.results import Results
from benchmarks.gpu.steps import SKIPPED, Setting, StepEnded, StepSkipped, find
from eagle_plugin.common.command_end import end_of


def end_at_once(number: int, frame: object) -> NoReturn:
    """What was started ends with its context: engines, temporary folders."""
    raise StepEnded("the step was ended")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--identity", type=json.loads, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, end_at_once)
    step = find(options.name)
    results = Results(options.out, step, options.identity)
    logs = options.out / "logs" / step.name
    try:
        result = step.run(Setting(options.device, options.tiny, None, options.short, results.keep, logs))
    except StepSkipped as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    results.finish(result)
    return 0


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
