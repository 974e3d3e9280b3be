"""Whether the acceptance of live traffic is below what was measured of a head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from eagle_plugin.common.errors import UserError
from eagle_plugin.common.json_files import read_object
from eagle_plugin.learning.deploy.counts import Z_LIMIT, Counts

LEAST_ROUNDS = 2000


class WatchError(UserError):
    """The watch has nothing to compare."""


class Finding(NamedTuple):
    """accept_length: tokens per round, with the bonus token. drifted: None where there are too few rounds."""

    rounds: int
    accept_length: float
    z: float
    drifted: bool | None


def judge(counts: Counts, expected: float, margin: float) -> Finding:
    """Whether the mean accept length is below (1 - margin) * expected, by a one-sided z-test of level 1 %."""
    n = int(counts.rounds)
    if n < LEAST_ROUNDS:
        return Finding(n, counts.accept_length if n else math.nan, math.nan, None)
    z = (expected * (1 - margin) - counts.accept_length) / math.sqrt(counts.variance)
    return Finding(n, counts.accept_length, z, z > Z_LIMIT)


def expected_by_domain(head: Path) -> dict[str, float]:
    """Accept length of the trained head by set of prompts, as the benchmark measured it in a server.

    head: a package, or a head in the folder of the job that trained it.

    Raises:
        WatchError: there is no benchmark of this head.
    """
    head = head.resolve()
    for folder in (head, *head.parents[:3]):
        for name in ("package.json", "benchmark/states.json"):
            if (found := _read(folder / name)) is None:
                continue
            report = found.get("measured", {}).get("benchmark", {}) if name == "package.json" else found
            if lengths := _lengths(report, folder / name):
                return lengths
    raise WatchError(
        f"{head} has no benchmark beside it, wanted a package or the head of a job with benchmark/states.json; "
        "measure it with `eagle-plugin benchmark`, or give --expect"
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return read_object(path, WatchError, "measure the head again")
    except FileNotFoundError:
        return None


def _lengths(report: Mapping[str, Any], path: Path) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    try:
        for row in report.get("rows", []):
            if row["state"] == "trained" and row["accept_length"] is not None:
                found.setdefault(str(row["prompts"]), []).append(float(row["accept_length"]["median"]))
    except (KeyError, TypeError, ValueError) as error:
        raise WatchError(f"{path} is not of a benchmark ({error!r}); measure the head again") from error
    return {name: fmean(values) for name, values in found.items()}
