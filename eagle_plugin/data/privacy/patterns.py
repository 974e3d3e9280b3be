"""What a finding is, and regular expressions that are tried only on texts with one of their needles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Private data of a type at text[start:end]."""

    type: str
    start: int
    end: int


@dataclass(frozen=True)
class Pattern:
    """One regular expression; the private part is its group "value", or the whole match."""

    type: str
    needles: tuple[str, ...]  # lower case; the expression is tried only on texts that contain one of them
    regex: re.Pattern[str]
    accept: Callable[[re.Match[str]], bool]  # a final check


def pattern(
    type: str,
    needles: str,
    regex: str,
    accept: Callable[[re.Match[str]], bool] = bool,
    flags: re.RegexFlag = re.NOFLAG,
) -> Pattern:
    """A pattern whose needles are given as one string, with spaces between them."""
    return Pattern(type, tuple(needles.split()), re.compile(regex, flags), accept)


def find_patterns(patterns: Sequence[Pattern], text: str) -> Iterator[Finding]:
    """Yield the findings of the patterns, not ordered by position; they may overlap."""
    lower = text.lower()
    for one in patterns:
        if any(needle in lower for needle in one.needles):
            group: str | int = "value" if "value" in one.regex.groupindex else 0
            for match in one.regex.finditer(text):
                if match[group] and one.accept(match):
                    yield Finding(one.type, *match.span(group))


def find_windows(trigger: re.Pattern[str], text: str, margin: int) -> Iterator[tuple[int, int]]:
    """The text around each match of the trigger, as (start, stop); cut at line ends, and merged if they overlap."""
    low, high = -1, -1
    for match in trigger.finditer(text):
        start = max(text.rfind("\n", 0, match.start()) + 1, match.start() - margin)
        stop = text.find("\n", match.end(), match.end() + margin)
        stop = min(len(text), match.end() + margin) if stop < 0 else stop
        if start <= high:
            high = max(high, stop)
            continue
        if high >= 0:
            yield low, high
        low, high = start, stop
    if high >= 0:
        yield low, high
