"""Finds private data in texts, also in the strings of JSON and code."""

from __future__ import annotations

import importlib
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from eagle_plugin.common.installed import install_command
from eagle_plugin.learning.data.privacy.cards import find_cards
from eagle_plugin.learning.data.privacy.decoded import Decoded
from eagle_plugin.learning.data.privacy.identity_numbers import find_identity_numbers, load_checks
from eagle_plugin.learning.data.privacy.keys import KEYS
from eagle_plugin.learning.data.privacy.named_values import NAMED_VALUES, WALLETS
from eagle_plugin.learning.data.privacy.passwords import PASSWORDS, QUOTED_PASSWORDS
from eagle_plugin.learning.data.privacy.patterns import Finding, find_patterns
from eagle_plugin.learning.data.privacy.phones import PHONE_REGIONS, PhoneFinder
from eagle_plugin.learning.data.privacy.recognisers import load_recognisers, run_recogniser
from eagle_plugin.learning.data.privacy.spelled_emails import SPELLED_EMAILS
from eagle_plugin.learning.data.privacy.street_addresses import find_street_addresses
from eagle_plugin.learning.data.rows import DataError

_PATTERNS = (*KEYS, *PASSWORDS, *SPELLED_EMAILS, *NAMED_VALUES, *WALLETS)
UserRecogniser = Callable[[str], Iterable[tuple[str, int, int]]]


@dataclass(frozen=True)
class Reading:
    """A decoded text and the private data in it, by position; the positions are those of the decoded text."""

    view: Decoded
    findings: list[Finding]


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
        self._remembered: dict[str, Reading] | None = None
        try:
            self._recognisers = load_recognisers()
            self._checks = load_checks()
            self._phones = PhoneFinder(phone_regions)
        except ImportError as error:
            raise DataError(
                f"the privacy filter needs the Python package {error.name}, which is not installed here; "
                f"run: {install_command('privacy')}; or switch the filter off with --privacy off"
            ) from error

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """While the block runs, a text is read once; for rows with much in common."""
        self._remembered = {}
        try:
            yield
        finally:
            self._remembered = None

    def read(self, text: str) -> Reading:
        """The private data in the text. Overlapping findings become one, with the type of the longest."""
        if self._remembered is None:
            return self._read(text)
        if text not in self._remembered:
            self._remembered[text] = self._read(text)
        return self._remembered[text]

    def _read(self, text: str) -> Reading:
        view = Decoded(text)
        found = [*self._find_in(view.text), *_find_quoted(view)]
        merged = _merge(found)
        if not view.exact:  # a backslash may also be meant as it is, as in a password; the decoded text goes first
            merged = _merge([*merged, *self._find_exact(text, view, merged)])
        pieces = [Finding(one.type, *piece) for one in merged for piece in view.pieces(one.start, one.end)]
        return Reading(view, pieces)

    def find(self, text: str) -> list[Finding]:
        """The private data in the text, by position."""
        reading = self.read(text)
        places = reading.view.places
        return [Finding(one.type, places[one.start], places[one.end]) for one in reading.findings]

    def scan(self, text: str) -> bool:
        """Whether the text has private data; faster than `find`, for answers, which are dropped and not redacted."""
        view = Decoded(text)
        found = chain(self._find_in(view.text), _find_quoted(view))
        if not view.exact:
            found = chain(found, self._find_exact(text, view, []))
        return next(found, None) is not None

    def _find_exact(self, text: str, view: Decoded, known: list[Finding]) -> Iterator[Finding]:
        """What is found if backslashes outside of JSON are no escapes, where nothing else is known."""
        exact = Decoded(text, code=False)
        starts = [one.start for one in known]
        for found in self._find_in(exact.text):
            start, end = view.span(exact.places[found.start], exact.places[found.end])
            before = bisect_left(starts, end)
            if start < end and (before == 0 or known[before - 1].end <= start):
                yield Finding(found.type, start, end)

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


def _merge(findings: Iterable[Finding]) -> list[Finding]:
    """The findings by position. Overlapping ones become one, with the type of the longest."""
    merged: list[Finding] = []
    longest = 0
    for found in sorted(findings, key=lambda found: (found.start, -found.end)):
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


def _find_quoted(view: Decoded) -> Iterator[Finding]:
    """Passwords with quotes in them: decoded, they would end at the first one."""
    for text, places in view.quoted:
        for found in find_patterns(QUOTED_PASSWORDS, text):
            start, end = view.span(places[found.start], places[found.end])
            if start < end:
                yield Finding(found.type, start, end)


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
