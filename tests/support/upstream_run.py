"""What the reproductions of upstream faults in both engines share: the verdict, its exit code, folders for models."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

SHOWN, ABSENT, UNKNOWN = 0, 1, 2
Reproduction = Callable[[Path], bool]


def say(what: str, value: object) -> None:
    """Print one thing that was seen."""
    print(f"  {what:50} {value}", flush=True)


def run(reproductions: Mapping[str, Reproduction], version: str) -> int:
    """Run the reproduction that the command line names, with a new folder for its models; returns the exit code."""
    name = sys.argv[1]
    print(f"{name}, {version}", flush=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        try:
            shown = reproductions[name](Path(folder))
        except Exception as error:  # whatever a new version of the engine makes of it
            print(f"error: {name} could not be tried: {type(error).__name__}: {error}", file=sys.stderr)
            return UNKNOWN
    print(f"{name}: the fault is {'there' if shown else 'not there'}", flush=True)
    return SHOWN if shown else ABSENT
