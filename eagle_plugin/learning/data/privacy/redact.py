"""Replaces private data in the texts of a conversation by placeholders."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from eagle_plugin.learning.data.privacy.patterns import Finding
from eagle_plugin.learning.data.privacy.scanner import Reading, Scanner

MODES = ("drop", "redact", "report", "off")
_WORD = re.compile(r"[A-Za-z0-9_]")
_PLACEHOLDER = re.compile(r"<[A-Z_]+_\d+>")
_KEY = 8  # characters of a value by which it is looked up


def redact(texts: Sequence[str], scanner: Scanner) -> tuple[list[str], Counter[str]]:
    """The texts of one row with typed placeholders (<EMAIL_1>) for private data, and the number of findings by type.

    A value has the same placeholder in the whole row, however it is escaped. That includes places where the scanner
    alone would not find it, for instance a password without the word "password" before it. A text that is JSON stays
    JSON: a number becomes a string, and all else is left as it is.
    """
    readings = [scanner.read(text) for text in texts]
    counts = Counter(found.type for reading in readings for found in reading.findings)
    if not counts:
        return list(texts), counts
    names = _Names()
    for reading in readings:
        for found in reading.findings:
            names.of(found.type, reading.view.text[found.start : found.end])
    known = _KnownValues(names.types)
    replaced = (_replace(text, reading, names, known) for text, reading in zip(texts, readings, strict=True))
    return [_replace_as_written(text, names, known) for text in replaced], counts


class _Names:
    """The placeholder of each value."""

    def __init__(self) -> None:
        self.types: dict[str, str] = {}  # by value
        self._names: dict[str, str] = {}  # by value
        self._counts: Counter[str] = Counter()  # by type

    def of(self, type: str, value: str) -> str:
        if value not in self._names:
            self._counts[type] += 1
            self.types[value] = type
            self._names[value] = f"<{type}_{self._counts[type]}>"
        return self._names[value]


class _KnownValues:
    """Finds values that are private elsewhere in the row; the time does not grow with their number."""

    def __init__(self, types: dict[str, str]) -> None:
        """types: the type of each value."""
        self._types = types
        self._size = min(_KEY, *map(len, types))
        self._by_key: dict[str, list[str]] = {}
        # Longest first: if one value is the beginning of another, the longer one is tried first.
        for value in sorted(types, key=len, reverse=True):
            self._by_key.setdefault(value[: self._size], []).append(value)
        self._first = re.compile("|".join({re.escape(value[0]) for value in types}))

    def find(self, text: str, start: int, stop: int) -> Iterator[Finding]:
        """Yield the values in text[start:stop] that are no part of a longer word."""
        end = start
        for first in self._first.finditer(text, start, stop):
            at = first.start()
            if at < end or at != end and _is_inside_word(text, at):  # at `end`, a placeholder is before it
                continue
            for value in self._by_key.get(text[at : at + self._size], ()):
                after = at + len(value)
                whole = after == stop or after < stop and not _is_inside_word(text, after)
                if whole and text.startswith(value, at):
                    yield Finding(self._types[value], at, after)
                    end = after
                    break


def _is_inside_word(text: str, place: int) -> bool:
    return 0 < place < len(text) and bool(_WORD.match(text[place]) and _WORD.match(text[place - 1]))


def _replace(text: str, reading: Reading, names: _Names, known: _KnownValues) -> str:
    """The text with a placeholder for each finding, and for each known value between them."""
    view, read, end = reading.view, 0, 0  # read: of the decoded text; end: the same place in the given one
    pieces: list[str] = []
    for found in _with_known(reading, known):
        if found.start < read:
            continue
        read, quote = found.end, view.quote(found.start)
        name = names.of(found.type, view.text[found.start : found.end])
        pieces += text[end : view.places[found.start]], quote, name, quote
        end = view.places[found.end]
    return "".join(pieces) + text[end:]


def _replace_as_written(text: str, names: _Names, known: _KnownValues) -> str:
    """The text with a placeholder for each known value that an escape hides: "\\nAbc" is also a backslash and "nAbc".

    The backslash goes with it, so that what is JSON stays JSON.
    """
    pieces: list[str] = []
    end = place = 0
    for part in (*_PLACEHOLDER.finditer(text), None):
        for found in known.find(text, place, part.start() if part else len(text)):
            before = text[end : found.start]
            escaped = (len(before) - len(before.rstrip("\\"))) % 2
            pieces += before[: len(before) - escaped], names.of(found.type, text[found.start : found.end])
            end = found.end
        place = part.end() if part else place
    return "".join(pieces) + text[end:]


def _with_known(reading: Reading, known: _KnownValues) -> Iterator[Finding]:
    view, end = reading.view, 0
    for found in [*reading.findings, None]:
        for other in known.find(view.text, end, found.start if found else len(view.text)):
            yield from (Finding(other.type, *piece) for piece in view.pieces(other.start, other.end))
        if found:
            yield found
            end = found.end
