"""Writes one log line per minute that says what the policy does; `eagle-plugin explain` reads it (docs/metrics.md)."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping

from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.report import (
    MARK,
    NO_POLICY,
    PolicyReport,
    ShapeTotals,
    accept_length,
    difference,
    name_of,
    present_choice,
    sum_of,
    tokens_per_second,
)

LOG_SECONDS = 60.0
VARIABLE = "EAGLE_POLICY_LOG_SECONDS"
MOST_SHARES = 4  # shapes that the line names, those with the most rounds


class LogSecondsError(UserError):
    """``EAGLE_POLICY_LOG_SECONDS`` is no number of seconds."""


def log_seconds() -> float:
    """Seconds between two lines, by ``EAGLE_POLICY_LOG_SECONDS``; 0: there are none. Raises LogSecondsError."""
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text or LOG_SECONDS)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise LogSecondsError(f"{VARIABLE} is {text!r}, wanted a number of seconds, or 0 for no lines")
    return seconds


class PolicyLog:
    """Writes the line while rounds run; without a policy it writes none."""

    def __init__(
        self,
        chooser: Callable[[], ShapeChooser],
        logger: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """chooser: gives the server's present one, which comes when the costs of a round are known.

        Raises LogSecondsError.
        """
        self._chooser, self._logger, self._clock = chooser, logger, clock
        self._every = log_seconds()
        self._since: tuple[float, Mapping[Shape, ShapeTotals]] | None = None

    def step(self) -> None:
        """Note that the server made a step, in the thread that calls the chooser; writes the line when it is time."""
        chooser = self._chooser()
        if not self._every or chooser.policy is None:
            return
        now = self._clock()
        if self._since is None:
            self._since = now, dict(chooser.totals)
            return
        began, before = self._since
        if now - began < self._every:
            return
        added = difference(chooser.totals, before)
        if not sum_of(added.values()).rounds:
            return
        report = chooser.report()
        self._logger.info("eagle-plugin: %s; %s%s", sentence(report, added, now - began), MARK, report.as_json())
        self._since = now, report.totals


def sentence(report: PolicyReport, added: Mapping[Shape, ShapeTotals], seconds: float) -> str:
    """What happened in the last `seconds`, in which `added` was counted, what the policy chooses now, and why."""
    total = sum_of(added.values())
    by_rounds = sorted(added, key=lambda shape: -added[shape].rounds)
    shares = [f"{name_of(shape)} {added[shape].rounds / total.rounds:.0%}" for shape in by_rounds[:MOST_SHARES]]
    if by_rounds[MOST_SHARES:]:
        shares.append(f"others {sum(added[x].rounds for x in by_rounds[MOST_SHARES:]) / total.rounds:.0%}")
    parts = [f"policy, {seconds:.0f} s, {total.rounds} rounds: {', '.join(shares)}"]
    length, speed = accept_length(added), tokens_per_second(added)
    parts.append("no drafts" if length is None else f"accept length {length:.2f}")
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s while decoding")
    if total.timed and total.predicted:
        took, error = total.seconds / total.timed * 1e3, total.seconds / total.predicted - 1
        parts.append(f"a step took {took:.1f} ms, {error:+.0%} against the prediction")
    return "; ".join([*parts, present_choice(report)])


def without_policy(caps: Shape, mode: str, reason: str = "") -> str:
    """The start-up line of a server without a policy; `eagle-plugin explain` looks for it.

    reason: why there is none, if ``EAGLE_POLICY`` does not say it.
    """
    what = f"a random shape within {caps}" if mode == "random" else f"the shape {caps}"
    return f"{NO_POLICY}{reason or f'EAGLE_POLICY is {mode}'}: every round has {what}"
