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


def find_patterns(patterns: Sequence[Pattern], text: str, start: int = 0, stop: int | None = None) -> Iterator[Finding]:
    """Yield the findings of the patterns in text[start:stop], not ordered by position; they may overlap."""
    stop = len(text) if stop is None else stop
    lower = text[start:stop].lower()
    for one in patterns:
        if any(needle in lower for needle in one.needles):
            group: str | int = "value" if "value" in one.regex.groupindex else 0
            for match in one.regex.finditer(text, start, stop):
                if match[group] and one.accept(match):
                    yield Finding(one.type, *match.span(group))


def find_windows(
    trigger: re.Pattern[str],
    text: str,
    margin: int,
    *,
    lines: bool = True,
    wanted: Callable[[re.Match[str]], bool] = bool,
) -> Iterator[tuple[int, int]]:
    """The text around each wanted match of the trigger, as (start, stop); merged if they overlap.

    They are cut at the ends of lines, unless `lines` is False.
    """
    low, high = -1, -1
    for match in filter(wanted, trigger.finditer(text)):
        start, stop = max(0, match.start() - margin), min(len(text), match.end() + margin)
        if lines:
            start = max(start, text.rfind("\n", start, match.start()) + 1)
            end = text.find("\n", match.end(), stop)
            stop = stop if end < 0 else end
        if start <= high:
            high = max(high, stop)
            continue
        if high >= 0:
            yield low, high
        low, high = start, stop
    if high >= 0:
        yield low, high
