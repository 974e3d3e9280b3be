"""Finds private data in texts and replaces it by placeholders."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from eagle_plugin.data.privacy.cards import find_cards
from eagle_plugin.data.privacy.identity_numbers import find_identity_numbers, load_checks
from eagle_plugin.data.privacy.keys import KEYS
from eagle_plugin.data.privacy.passwords import PASSWORDS
from eagle_plugin.data.privacy.patterns import Finding, find_patterns
from eagle_plugin.data.privacy.phones import PHONE_REGIONS, PhoneFinder
from eagle_plugin.data.privacy.recognisers import load_recognisers, run_recogniser
from eagle_plugin.data.privacy.spelled_emails import SPELLED_EMAILS
from eagle_plugin.data.privacy.street_addresses import find_street_addresses
from eagle_plugin.data.rows import DataError

MODES = ("drop", "redact", "report", "off")
_PATTERNS = (*KEYS, *PASSWORDS, *SPELLED_EMAILS)
# A character as JSON and code write it, also in JSON within JSON.
_ESCAPED = re.compile(r"\\+(?:([nrtbfv])|u([0-9A-Fa-f]{4})|([\"'/]))")
# Where another word cannot go on: at the beginning of a word, and after an escaped character.
_WORD_BEGINS = r"(?:(?<!\w)|(?<=\\[nrtbfv])|(?<=\\u[0-9A-Fa-f]{4}))"
UserRecogniser = Callable[[str], Iterable[tuple[str, int, int]]]


class Scanner:
    """Finds e-mail, IP and street addresses, phone, card, bank and national identity numbers, passwords and keys.

    Phone numbers without a country code are found for the given regions (codes of ISO 3166).

    Names of persons need a model: give one as `recogniser`, the dotted path "module:function" of a function that takes
    a text and returns (type, start, end) triples.

    Raises:
        DataError: the recognisers are not installed, the path is not that of a function, or a region is unknown.
    """

    def __init__(self, recogniser: str | None = None, phone_regions: Sequence[str] = PHONE_REGIONS) -> None:
        self._user = load_user_recogniser(recogniser) if recogniser else None
        try:
            self._recognisers = load_recognisers()
            self._checks = load_checks()
            self._phones = PhoneFinder(phone_regions)
        except ImportError as error:
            raise DataError(
                f"the privacy filter needs the Python package {error.name}, which is not installed here; "
                "run: pip install 'eagle-plugin[privacy]', or switch the filter off with --privacy off"
            ) from error

    def find(self, text: str) -> list[Finding]:
        """The private data in the text, by position. Overlapping findings become one, with the type of the longest."""
        merged: list[Finding] = []
        longest = 0
        for found in sorted(self._find_all(text), key=lambda found: (found.start, -found.end)):
            length = found.end - found.start
            if merged and found.start < merged[-1].end:
                last = merged[-1]
                type = found.type if length > longest else last.type
                merged[-1] = Finding(type, last.start, max(last.end, found.end))
                longest = max(longest, length)
            else:
                merged.append(found)
                longest = length
        return merged

    def scan(self, text: str) -> bool:
        """Whether the text has private data; faster than `find`, for answers, which are dropped and not redacted."""
        return next(self._find_all(text), None) is not None

    def _find_all(self, text: str) -> Iterator[Finding]:
        yield from self._find_in(text)
        plain, places = _unescape(text)
        if len(plain) < len(text):
            for found in self._find_in(plain):
                yield Finding(found.type, places[found.start], places[found.end])

    def _find_in(self, text: str) -> Iterator[Finding]:
        yield from find_patterns(_PATTERNS, text)
        yield from find_street_addresses(text)
        yield from find_identity_numbers(self._checks, text)
        yield from find_cards(text)
        for recogniser in self._recognisers:
            yield from run_recogniser(recogniser, text)
        # Last: of findings at one place the first gives the type, and phone numbers have few rules.
        yield from self._phones.find(text)
        for type, start, end in self._user(text) if self._user else ():
            if 0 <= start < end <= len(text):
                yield Finding(re.sub(r"\W+", "_", type).upper(), start, end)


def _unescape(text: str) -> tuple[str, Sequence[int]]:
    """The text with escaped characters as they are, so that their letters are no part of the word beside them; and the
    place in `text` of each of its characters, and of its end."""
    pieces: list[str] = []
    places: list[int] = []
    end = 0
    for found in _ESCAPED.finditer(text):
        space, code, mark = found.groups()
        letter = chr(int(code, 16)) if code else mark
        pieces += text[end : found.start()], "\n" if space or "\ud800" <= letter <= "\udfff" else letter
        places += (*range(end, found.start()), found.start())
        end = found.end()
    places += range(end, len(text) + 1)
    return "".join(pieces) + text[end:], places


def load_user_recogniser(path: str) -> UserRecogniser:
    """The function at the dotted path "module:function".

    Raises:
        DataError: naming what is missing.
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(
            f"--recogniser {path} cannot be loaded ({error}); wanted module:function of an importable module"
        ) from error
    if not callable(function):
        raise DataError(f"--recogniser {path} is a {type(function).__name__}, wanted a function from text to findings")
    return function


def redact(texts: Sequence[str], scanner: Scanner) -> tuple[list[str], Counter[str]]:
    """The texts of one row with typed placeholders (<EMAIL_1>) for private data, and the number of findings by type.

    A value has the same placeholder in the whole row. That includes places where the scanner alone would not find it,
    for instance a password without the word "password" before it.
    """
    found = [scanner.find(text) for text in texts]
    counts = Counter(finding.type for findings in found for finding in findings)
    if not counts:
        return list(texts), counts
    names: dict[str, str] = {}
    placeholders: Counter[str] = Counter()  # by type
    for text, findings in zip(texts, found, strict=True):
        for finding in findings:
            value = text[finding.start : finding.end]
            if value not in names:
                placeholders[finding.type] += 1
                names[value] = f"<{finding.type}_{placeholders[finding.type]}>"
    # Longest first: if one value is the beginning of another, the longer one is tried first.
    values = sorted(names, key=len, reverse=True)
    elsewhere = re.compile("|".join(rf"{_WORD_BEGINS}{re.escape(value)}(?!\w)" for value in values))
    return [_replace(text, findings, names, elsewhere) for text, findings in zip(texts, found, strict=True)], counts


def _replace(text: str, findings: list[Finding], names: dict[str, str], elsewhere: re.Pattern[str]) -> str:
    pieces, end = [], 0
    for finding in findings:
        pieces.append(elsewhere.sub(lambda match: names[match[0]], text[end : finding.start]))
        pieces.append(names[text[finding.start : finding.end]])
        end = finding.end
    pieces.append(elsewhere.sub(lambda match: names[match[0]], text[end:]))
    return "".join(pieces)
