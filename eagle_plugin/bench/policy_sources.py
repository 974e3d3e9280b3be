"""Reads what a server's rounds and policy do: from its metrics, from its log, or from a file with either."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import httpx

from eagle_plugin.common.errors import UserError
from eagle_plugin.common.http_failures import NO_SCHEME, describe_failure
from eagle_plugin.common.metric_registry import PREFIX
from eagle_plugin.core.shape import MAX_WIDTH
from eagle_plugin.policy.metric_table import ACCEPTED_AT_DEPTH, LABELS, SECONDS, TOTALS, VERIFY_ROUNDS, report_of
from eagle_plugin.policy.report import MARK, NO_POLICY, PolicyReport, ReportError

STDIN = "-"
ADDRESS = re.compile(r"[\w.-]+:\d+(/\S*)?$")  # of a server, without http://
TIMEOUT = 15.0  # seconds
SERVES = "is served by the plugin's draft trees"  # in the start-up line of a server on the plugin


class SourceError(UserError):
    """A source that tells nothing about a policy; the message says what was found, what was wanted and the fix."""


def read_report(source: str) -> PolicyReport:
    """The newest report of a server's URL, of a file, or of standard input (`-`). Raises SourceError."""
    if source.startswith(("http://", "https://")):
        return report_of_metrics(_fetch(source), source)
    if source == STDIN:
        return report_of_lines(sys.stdin, "the standard input")
    try:
        with Path(source).open(encoding="utf-8", errors="replace") as lines:
            return report_of_lines(lines, source)
    except OSError as error:
        if ADDRESS.match(source):
            raise SourceError(f"{source} is no file; for a server {NO_SCHEME}") from error
        raise SourceError(
            f"{source} cannot be read ({error.strerror or error}), wanted the URL of a server or the file of its log"
        ) from error


def counted_errors(log: str) -> tuple[int, ...]:
    """The timed steps of a server by the error of their prediction, by the last whole line of the policy in its log.

    Empty if there is none.
    """
    for line in reversed(log.splitlines()):
        if MARK in line:
            with suppress(ReportError):  # the line is being written
                return _report_at_end(line).errors
    return ()


def report_of_lines(lines: Iterable[str], source: str) -> PolicyReport:
    """The last report of a log, or of a text of metrics. Raises SourceError."""
    newest, fault, metrics, seen = None, None, [], ""
    for line in lines:
        if line.startswith(PREFIX):
            metrics.append(line)
        elif MARK in line:
            try:
                newest = _report_at_end(line)
            except ReportError as error:  # such as a line that is cut short
                fault = error
        elif NO_POLICY in line:
            seen = f"its server has no policy, {line.partition(NO_POLICY)[2].partition(':')[0]}"
        elif SERVES in line and not seen:
            seen = "its server has written none yet: it writes one per EAGLE_POLICY_LOG_SECONDS (60) while it decodes"
    if newest is not None:
        return newest
    if metrics:
        return report_of_metrics("".join(metrics), source)
    if fault is not None:
        raise SourceError(f"{source} has an unreadable line of the policy: {fault}; use its server's eagle-plugin")
    found = seen or "it is not the log of a server on the plugin"
    raise SourceError(f"{source} has no line of the policy ({MARK.strip()}): {found}")


def _report_at_end(line: str) -> PolicyReport:
    """Of a log line; what a terminal or a log collector adds after the JSON is ignored. Raises ReportError."""
    text = line.partition(MARK)[2]
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"its JSON is not whole ({str(error)[:80]})") from error
    return PolicyReport.from_json(text[:end])


def _fetch(url: str) -> str:
    """The text of a server's metrics endpoint. Raises SourceError."""
    address = url.rstrip("/").removesuffix("/v1")
    address = address if address.endswith("/metrics") else f"{address}/metrics"
    try:
        answer = httpx.get(address, timeout=TIMEOUT, trust_env=False, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SourceError(f"{url} does not answer ({describe_failure(error)}): check address and port") from error
    if answer.status_code == httpx.codes.NOT_FOUND:
        raise SourceError(f"{address} is not there (404): start SGLang with --enable-metrics, or name the server's log")
    if answer.status_code != httpx.codes.OK:
        raise SourceError(f"{address} answered with status {answer.status_code}, wanted 200: name the server's log")
    return answer.text


class Sample(NamedTuple):
    """One number of a text of metrics."""

    name: str  # without PREFIX
    label: str  # its own one beside the engine's, such as the shape or the depth; else empty
    value: float


def samples_of(text: str) -> dict[tuple[tuple[str, str], ...], list[Sample]]:
    """The plugin's samples in a text of Prometheus metrics, by the engine's own labels. Raises ValueError."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[tuple[tuple[str, str], ...], list[Sample]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name.startswith(PREFIX) else ():
            labels = dict(sample.labels)
            own = "".join(labels.pop(name, "") for name in LABELS)
            found[tuple(sorted(labels.items()))].append(Sample(sample.name.removeprefix(PREFIX), own, sample.value))
    return found


def counted_rounds(text: str, plain: bool = False) -> tuple[float, tuple[float, ...]]:
    """Rounds that drafted, and those of them that accepted 1, 2, ... drafts or more, of all engines together.

    text: Prometheus metrics. plain: count the rounds without drafts too, as benchmarks do. Only a policy has such
    rounds, and it counts all of them by shape. Raises ValueError where it is none, and KeyError where it has no rounds.
    """
    by_engine = samples_of(text).values()
    rounds = [sum(x.value for x in found if x.name == VERIFY_ROUNDS.exported) for found in by_engine]
    if plain:
        all_rounds = TOTALS["rounds"].exported
        rounds = [
            max(drafted, sum(x.value for x in found if x.name == all_rounds))
            for drafted, found in zip(rounds, by_engine, strict=True)
        ]
    depths: dict[int, float] = {}
    for sample in (sample for samples in by_engine for sample in samples):
        if sample.name == ACCEPTED_AT_DEPTH.exported:
            depth = int(sample.label)
            if not 0 < depth < MAX_WIDTH:
                raise ValueError(f"{sample.name} has depth {sample.label}, wanted one from 1 to {MAX_WIDTH - 1}")
            depths[depth] = depths.get(depth, 0.0) + sample.value
    if not any(x.name == VERIFY_ROUNDS.exported for found in by_engine for x in found):
        raise KeyError(PREFIX + VERIFY_ROUNDS.exported)
    return sum(rounds), tuple(depths.get(depth, 0.0) for depth in range(1, max(depths, default=0) + 1))


def report_of_metrics(text: str, source: str) -> PolicyReport:
    """The report of a text of metrics: of the engine or rank with the most rounds, if it has several.

    Raises SourceError.
    """
    try:
        by_engine = samples_of(text)
    except ValueError as error:
        raise SourceError(f"{source} is no text of Prometheus metrics ({str(error)[:80]})") from error
    if not any(by_engine.values()):
        raise SourceError(
            f"{source} has no metrics of eagle-plugin: its server is not on the plugin, or has decoded nothing yet"
        )
    counted = TOTALS["rounds"].exported
    samples = max(by_engine.values(), key=lambda found: sum(x.value for x in found if x.name == counted))
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for sample in samples:
        values[sample.name][sample.label] = sample.value
    if not values[SECONDS.exported]:
        raise SourceError(
            f"{source} has no metrics of a policy: its server has none (EAGLE_POLICY is not auto), or has several API "
            "servers, and then its log tells"
        )
    try:
        return report_of(values)
    except (KeyError, ValueError, IndexError, ArithmeticError) as error:
        raise SourceError(
            f"{source} has metrics of another form ({type(error).__name__}: {error}): use its server's eagle-plugin"
        ) from error
