"""Run one step of `make gpu` in this process: python -m benchmarks.gpu.run_step NAME --device cuda --json FILE."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.gpu.steps import SKIPPED, Setting, StepSkipped, find
from eagle_plugin.atomic_io import replace_output
from eagle_plugin.command_end import end_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    try:
        result = find(options.name).run(Setting(options.device, options.tiny))
    except StepSkipped as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    with replace_output(options.json) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
