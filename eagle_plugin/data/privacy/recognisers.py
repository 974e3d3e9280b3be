"""Presidio's recognisers for e-mail, phone, card, IBAN, IP and social-security numbers, called on parts of the text.

Presidio's engine would load a language model and run every recogniser over every text. Here each recogniser reads only
the text around something that could be of its type; otherwise gigabytes of text would take too long.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from eagle_plugin.data.privacy.patterns import Finding
from eagle_plugin.data.rows import DataError

REGIONS = ("US", "GB", "FR", "DE", "IN", "AU")
LENIENCY = 1  # of phonenumbers: valid numbers, in any grouping
MARGIN = 128  # characters on each side of a trigger; no value of these types is longer
BEFORE = 40  # characters before a finding in which a word may name its type
SCORE = 0.4  # smallest score of Presidio that is accepted
# Top-level domains of private networks and of examples; the public suffix list does not have them.
PRIVATE_DOMAINS = ("corp", "example", "home", "internal", "intranet", "invalid", "lan", "local", "localdomain", "test")


@dataclass(frozen=True)
class Recogniser:
    """One of Presidio's recognisers: a pattern around whose matches it is called, and a check of its findings."""

    type: str
    trigger: re.Pattern[str]
    recogniser: Any
    accept: Callable[[str, int, int, float], bool]  # text, start, end, score


def load_recognisers() -> list[Recogniser]:
    """Make the recognisers; the import takes seconds.

    Raises:
        DataError: the packages are not installed.
    """
    try:
        import tldextract
        from presidio_analyzer import predefined_recognizers as presidio
    except ImportError as error:
        raise DataError(
            f"the privacy filter needs the Python package {error.name}, which is not installed here; "
            "run: pip install 'eagle-plugin[privacy]', or switch the filter off with --privacy off"
        ) from error
    # Presidio logs texts that fail a check, and texts may be private.
    logging.getLogger("presidio-analyzer").setLevel(logging.CRITICAL + 1)
    # Use the list inside the package: otherwise tldextract downloads a newer one.
    suffixes = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    class Email(presidio.EmailRecognizer):
        def validate_result(self, pattern_text: str) -> bool:
            domain = pattern_text.rpartition("@")[2]
            return bool(suffixes(domain).suffix) or domain.rpartition(".")[2].lower() in PRIVATE_DOMAINS

    phone = presidio.PhoneRecognizer(supported_regions=REGIONS, leniency=LENIENCY)
    made = (
        ("EMAIL", r"@", Email(), _is_address),
        ("PHONE", r"\d(?:[\s().\-/]{0,3}\d){6}", phone, _is_phone),
        ("CREDIT_CARD", r"\d(?:[ -]?\d){12}", presidio.CreditCardRecognizer(), _is_card),
        ("IBAN", r"[A-Z]{2}\d\d[ -]?[A-Z0-9]{4}", presidio.IbanRecognizer(), _scores),
        (
            "IP_ADDRESS",
            r"\d\.\d{1,3}\.\d{1,3}\.\d|[\dA-Fa-f]:[\dA-Fa-f:]*:",
            presidio.IpRecognizer(),
            _is_address_of_host,
        ),
        ("US_SSN", r"\d{3}[- .]?\d\d[- .]?\d{4}", presidio.UsSsnRecognizer(), _is_social_security),
    )
    return [Recogniser(type, re.compile(trigger), found, accept) for type, trigger, found, accept in made]


def run_recogniser(recogniser: Recogniser, text: str) -> Iterator[Finding]:
    """Yield what one recogniser finds in the windows around its triggers."""
    for start, stop in _windows(recogniser.trigger, text):
        window = text[start:stop]
        for hit in recogniser.recogniser.analyze(window, recogniser.recogniser.supported_entities) or []:
            if recogniser.accept(text, start + hit.start, start + hit.end, hit.score):
                yield Finding(recogniser.type, start + hit.start, start + hit.end)


def _windows(trigger: re.Pattern[str], text: str) -> Iterator[tuple[int, int]]:
    """The text around each match of the trigger, as (start, stop); cut at line ends, and merged if they overlap."""
    low, high = -1, -1
    for match in trigger.finditer(text):
        start = max(text.rfind("\n", 0, match.start()) + 1, match.start() - MARGIN)
        stop = text.find("\n", match.end(), match.end() + MARGIN)
        stop = min(len(text), match.end() + MARGIN) if stop < 0 else stop
        if start <= high:
            high = max(high, stop)
            continue
        if high >= 0:
            yield low, high
        low, high = start, stop
    if high >= 0:
        yield low, high


def _scores(text: str, start: int, end: int, score: float) -> bool:
    return score >= SCORE


def _is_address(text: str, start: int, end: int, score: float) -> bool:
    """An e-mail address, and not the git@host of a repository's URL."""
    return score >= SCORE and not text.startswith("git@", start)


_CALLS = re.compile(r"\b(?:(?:tele)?phone|tel|call|mobil|cell|fax|whatsapp|contact|sms|dial|hotline)", re.IGNORECASE)
# A dotted quad, a range (09-17, 168–174, 0830-0840), a CAS number, a date; a column of decimals.
_NO_PHONE = re.compile(
    r"(?:\d{1,3}\.){3}\d{1,3}(?:/\d+)?|\d+–\d+|(\d\d|\d{4})-(\d\d|\d{4})|\d{2,7}-\d\d-\d|\d\d-\d\d-\d{4}"
)
_DECIMALS = re.compile(r"(?:\d+\s+)*\d+\.\d+(?:\s+\d+(?:\.\d+)?)*")
_FRACTION = re.compile(r"\d\.$")


def _is_phone(text: str, start: int, end: int, score: float) -> bool:
    """It begins with +, or has the form of a phone number; digits in one piece only after a word such as "call"."""
    value, before = text[start:end], text[max(0, start - BEFORE) : start]
    if value.startswith("+"):
        return True
    if _NO_PHONE.fullmatch(value) or _DECIMALS.fullmatch(value) or _FRACTION.search(before):
        return False
    named = bool(_CALLS.search(before))
    return named or not (value.isdigit() or before.endswith((".", "-", "/", "_", "=")))


_CARD = re.compile(r"\d+|\d{4}([ -])\d{4}\1\d{4}\1\d{4}|\d{4}([ -])\d{6}\2\d{4,5}")


def _is_card(text: str, start: int, end: int, score: float) -> bool:
    """In one piece, or in the groups that are printed on cards: one number in ten passes the checksum by chance."""
    grouped = bool(_CARD.fullmatch(text[start:end]))
    return score >= SCORE and grouped and not re.search(r"\d[. ]$", text[max(0, start - 2) : start])


_SOCIAL = re.compile(r"ssn|social|tax.?id", re.IGNORECASE)


def _is_social_security(text: str, start: int, end: int, score: float) -> bool:
    """Three groups, or nine digits after a word such as "SSN"."""
    return score >= SCORE or bool(_SOCIAL.search(text[max(0, start - BEFORE) : start]))


_NUMBERED = re.compile(
    r"(?:\b(?:version|ver|v|release|section|sec|chapter|clause|figure|table|rule)s?\.?(?:\s+is|:)?|§|[=<>~!]=|\(=|-)\s*$",
    re.IGNORECASE,
)


def _is_address_of_host(text: str, start: int, end: int, score: float) -> bool:
    """Not a version or section number, and not an address that every machine has (loopback, 0.0.0.0, masks)."""
    if score < SCORE or re.match(r"\.\d", text[end : end + 2]) or _FRACTION.search(text[max(0, start - 2) : start]):
        return False
    address = ipaddress.ip_interface(text[start:end].partition("%")[0]).ip
    if address.is_loopback or address.is_unspecified or address.is_link_local or str(address).startswith("255."):
        return False
    if address.version == 6:  # a::b can also be C++ or Haskell
        return text.count(":", start, end) >= 3 and any(c.isdigit() for c in text[start:end])
    octets = address.packed
    # Numbers like 1.2.3.4 and 0.7.7.0 are far more often versions or headings than hosts.
    if octets[0] == 0 or max(octets) < 10:
        return False
    return not _NUMBERED.search(text[max(0, start - BEFORE) : start])
