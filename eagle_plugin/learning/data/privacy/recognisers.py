"""Presidio's recognisers for e-mail, IBAN, IP and US social-security numbers, called on parts of the text.

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

from eagle_plugin.learning.data.privacy.patterns import Finding, find_windows

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
        ImportError: the packages are not installed.
    """
    import tldextract
    from presidio_analyzer import predefined_recognizers as presidio

    # Presidio logs texts that fail a check, and texts may be private.
    logging.getLogger("presidio-analyzer").setLevel(logging.CRITICAL + 1)
    # Use the list inside the package: otherwise tldextract downloads a newer one.
    suffixes = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    class Email(presidio.EmailRecognizer):
        def validate_result(self, pattern_text: str) -> bool:
            domain = pattern_text.rpartition("@")[2]
            return bool(suffixes(domain).suffix) or domain.rpartition(".")[2].lower() in PRIVATE_DOMAINS

    made = (
        ("EMAIL", r"@", Email(), _is_address),
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
    for start, stop in find_windows(recogniser.trigger, text, MARGIN):
        window = text[start:stop]
        for hit in recogniser.recogniser.analyze(window, recogniser.recogniser.supported_entities) or []:
            if recogniser.accept(text, start + hit.start, start + hit.end, hit.score):
                yield Finding(recogniser.type, start + hit.start, start + hit.end)


def _scores(text: str, start: int, end: int, score: float) -> bool:
    return score >= SCORE


_URL_USER = re.compile(r"://[^\s/@]*$")


def _is_address(text: str, start: int, end: int, score: float) -> bool:
    """An e-mail address, and not git@host of a repository, @user@host of Mastodon, or the user and host of a URL."""
    if score < SCORE or text.startswith("git@", start) or text[max(0, start - 1) : start] == "@":
        return False
    value = text[start:end]
    return "://" not in value and "{" not in value and not _URL_USER.search(text[max(0, start - MARGIN) : start])


_FRACTION = re.compile(r"\d\.$")
_SOCIAL = re.compile(r"ssn|social|tax.?id", re.IGNORECASE)


def _is_social_security(text: str, start: int, end: int, score: float) -> bool:
    """Three groups, or nine digits after a word such as "SSN"."""
    return score >= SCORE or bool(_SOCIAL.search(text[max(0, start - BEFORE) : start]))


_NUMBERED = re.compile(
    r"(?:\b(?:version|ver|v|rv|release|section|sec|chapter|clause|figure|table|rule)s?\.?(?:\s+is|:)?|§|[=<>~!]=|\(=|-|[A-Za-z]/)\s*$",
    re.IGNORECASE,
)


# Documentation networks of IPv4. Programs that make logs anonymous put these in place of public addresses.
_STAND_INS = [ipaddress.ip_network(net) for net in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")]


def _is_address_of_host(text: str, start: int, end: int, score: float) -> bool:
    """Not a version or section number, and not an address that many networks have (192.168.1.1, loopback, masks)."""
    if score < SCORE or re.match(r"\.\d", text[end : end + 2]) or _FRACTION.search(text[max(0, start - 2) : start]):
        return False
    address = ipaddress.ip_interface(text[start:end].partition("%")[0]).ip
    if str(address).startswith("255.") or address.is_multicast:
        return False
    if address.is_private and not any(address in network for network in _STAND_INS):
        return False
    if address.version == 6:  # a::b can also be C++ or Haskell
        return text.count(":", start, end) >= 3 and any(c.isdigit() for c in text[start:end])
    octets = address.packed
    # Numbers like 1.2.3.4 and 0.7.7.0 are far more often versions or headings than hosts.
    if max(octets) < 10:
        return False
    return not _NUMBERED.search(text[max(0, start - BEFORE) : start])
