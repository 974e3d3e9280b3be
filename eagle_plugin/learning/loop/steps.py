"""Runs steps in order: each is done when its output exists; how long all of them take is told as they run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.learning.loop.settings import LoopError

SETTLED_S = 60.0  # a pace is that of the steps so far, and of so many seconds at the expected one


@dataclass(frozen=True)
class Step:
    """One step; it is done when `output` exists, which `run` writes last and whole."""

    name: str
    output: Path
    seconds: float  # of the whole step on two quiet cores, for the time left
    run: Callable[[], None]


def run_steps(
    steps: Sequence[Step], times: Path, console: Console, clock: Callable[[], float] = time.monotonic
) -> dict[str, float]:
    """Run the steps that are not done yet; returns the seconds of each step, of all runs together.

    Args:
        times: file of these seconds; a step that was interrupted counts what it took until then.

    Raises:
        LoopError: a step ended without its output. Errors of the steps pass.
    """
    spent = read_times(times)
    expected = measured = 0.0
    for number, step in enumerate(steps, 1):
        title = f"{number}/{len(steps)} {step.name}"
        if step.output.exists():
            console.print(f"[dim]{title}: done before[/]", highlight=False)
            continue
        pace = (measured + SETTLED_S) / (expected + SETTLED_S)
        left = pace * sum(one.seconds for one in steps[number - 1 :] if not one.output.exists())
        console.print(
            f"[bold]{title}[/], about {minutes(pace * step.seconds)}; {minutes(left)} left in all", highlight=False
        )
        began = clock()
        try:
            step.run()
        finally:
            seconds = clock() - began
            spent[step.name] = spent.get(step.name, 0.0) + seconds
            write_output(times, [json.dumps(spent, indent=1), "\n"])
        if not step.output.exists():
            raise LoopError(f"the step '{step.name}' ended without {step.output}; see its messages above")
        measured, expected = measured + seconds, expected + step.seconds
        console.print(f"{title}: done in {minutes(seconds)}", highlight=False)
    return spent


def read_times(path: Path) -> dict[str, float]:
    """The seconds of each step so far; a file that cannot be read counts as none, since nothing else depends on it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(seconds) for name, seconds in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def minutes(seconds: float) -> str:
    """Seconds as `4:05 minutes`, or `12 s` below one minute."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}:{whole % 60:02d} minutes"
