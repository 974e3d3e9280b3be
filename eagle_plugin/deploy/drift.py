"""Whether the acceptance of live traffic is below what was measured of a head: counts of a server and their test."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from eagle_plugin.errors import UserError

LEAST_ROUNDS = 2000
ROUNDS_PER_ANSWER = 16.0  # rounds of one answer resemble each other: so many count as one independent round
Z_LIMIT = 2.326  # one-sided, level 1 %
DRAFTING = "the server drafts nothing yet, or has no metrics: send requests, and start SGLang with --enable-metrics"


class WatchError(UserError):
    """The watch has nothing to compare."""


class Counts(NamedTuple):
    """Rounds of a server since its start, and those that accepted 1, 2, ... drafts or more."""

    rounds: float
    at_depth: tuple[float, ...]

    def since(self, before: Counts) -> Counts:
        """What came after `before`; everything if the server was started again meanwhile."""
        if self.rounds < before.rounds:
            return self
        old = dict(enumerate(before.at_depth))
        return Counts(self.rounds - before.rounds, tuple(n - old.get(k, 0.0) for k, n in enumerate(self.at_depth)))


class Finding(NamedTuple):
    """accept_length: tokens per round, with the bonus token. drifted: None where there are too few rounds."""

    rounds: int
    accept_length: float
    z: float
    drifted: bool | None


def counts_of(text: str) -> Counts:
    """The counts in a text of Prometheus metrics, of all engines in it together.

    Raises:
        WatchError: it is no such text, or the plugin has drafted nothing.
    """
    from prometheus_client.parser import text_string_to_metric_families

    rounds, seen = 0.0, False
    depths: dict[int, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "eagle_plugin:verify_rounds_total":
                    rounds, seen = rounds + sample.value, True
                elif sample.name == "eagle_plugin:accepted_at_depth_total":
                    depth = int(sample.labels["depth"])
                    depths[depth] = depths.get(depth, 0.0) + sample.value
    except (ValueError, KeyError) as error:
        raise WatchError(f"the answer is no text of Prometheus metrics ({error}); give the URL of a server") from error
    if not seen:
        raise WatchError(f"the metrics have no eagle_plugin:verify_rounds_total; {DRAFTING}")
    return Counts(rounds, tuple(depths.get(depth, 0.0) for depth in range(1, max(depths, default=0) + 1)))


def judge(counts: Counts, expected: float, margin: float) -> Finding:
    """Whether the mean accept length is below (1 - margin) * expected, by a one-sided z-test of level 1 %.

    The variance is that of the rounds, from the counts by depth. Rounds of one answer are not independent: the test
    counts `ROUNDS_PER_ANSWER` of them as one.
    """
    n = counts.rounds
    if n < LEAST_ROUNDS:
        return Finding(int(n), 1 + sum(counts.at_depth) / n if n else math.nan, math.nan, None)
    mean = sum(counts.at_depth) / n
    # E[a^2] of a count a is the sum over d of (2 d - 1) P(a >= d).
    square = sum((2 * depth - 1) * count for depth, count in enumerate(counts.at_depth, 1)) / n
    error = math.sqrt(max(square - mean * mean, 1e-12) * ROUNDS_PER_ANSWER / n)
    z = (expected * (1 - margin) - (1 + mean)) / error
    return Finding(int(n), 1 + mean, z, z > Z_LIMIT)


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
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise WatchError(f"{path} cannot be read ({error}); measure the head again") from error
    return found if isinstance(found, dict) else None


def _lengths(report: Mapping[str, Any], path: Path) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    try:
        for row in report.get("rows", []):
            if row["state"] == "trained" and row["accept_length"] is not None:
                found.setdefault(str(row["prompts"]), []).append(float(row["accept_length"]["median"]))
    except (KeyError, TypeError, ValueError) as error:
        raise WatchError(f"{path} is not of a benchmark ({error!r}); measure the head again") from error
    return {name: fmean(values) for name, values in found.items()}
