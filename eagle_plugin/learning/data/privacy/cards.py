"""Numbers of payment cards: prefix and length of an issuer, the groups that are printed, and the checksum (Luhn)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from eagle_plugin.learning.data.privacy.patterns import Finding
from eagle_plugin.learning.data.privacy.phones import COUNTED

_TRIGGER = re.compile(r"(?<![\w.])(?<!\d[ -])\d(?:[ -]?\d){11,18}(?![ -]?\d|[.,]\d|\w)")
_GROUPS = re.compile(r"\d+|\d{4}([ -])\d{4}\1\d{4}\1\d{2,4}(?:\1\d{3})?|\d{4}([ -])\d{6}\2\d{4,5}")
# Visa, Mastercard, American Express, Diners Club, Discover, JCB, UnionPay.
_ISSUERS = re.compile(
    r"4\d{15}(?:\d{3})?|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|3[47]\d{13}|3(?:0[0-5]|[689]\d)\d{11}|"
    r"6(?:011|4[4-9]\d|5\d\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}|62\d{14,17}"
)
_MAESTRO = re.compile(r"(?:5018|5020|5038|5[678]\d\d|6304|6759|676[1-3]|0604|6390)\d{8,15}")
_CARD = re.compile(
    r"card|visa|mastercard|amex|maestro|karte|tarjeta|cart[aãeõ]o?|carta|kart[aą]|カード|\bpan\b|\bcc\b", re.IGNORECASE
)
_BEFORE = 40


def find_cards(text: str) -> Iterator[Finding]:
    """Yield the card numbers in the text: one number in ten passes the checksum by chance, so the rest must fit too."""
    for match in _TRIGGER.finditer(text):
        digits = re.sub(r"\D", "", match[0])
        before = text[max(0, match.start() - _BEFORE) : match.start()]
        named = bool(_CARD.search(before))
        issued = _ISSUERS.fullmatch(digits) or named and _MAESTRO.fullmatch(digits)
        if issued and _GROUPS.fullmatch(match[0]) and _passes_luhn(digits) and (named or not COUNTED.search(before)):
            yield Finding("CREDIT_CARD", *match.span())


def _passes_luhn(digits: str) -> bool:
    from stdnum import luhn

    return luhn.is_valid(digits)
