"""Phone numbers: libphonenumber's matcher, for the regions of the user, and rules about which digits are a number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from eagle_plugin.learning.data.privacy.patterns import Finding, find_windows
from eagle_plugin.learning.data.rows import DataError

# Regions whose numbers are found without their country code. Each makes the scan slower, and more digits a number.
PHONE_REGIONS = ("US", "GB", "FR", "DE", "IN", "AU", "BR", "JP", "ES", "IT", "PT", "MX", "PL", "NL")
PHONE_REGIONS_HELP = (
    "countries whose phone numbers are found without a country code, as codes of ISO 3166 (default: %(default)s)"
)
MARGIN = 48  # characters on each side of a trigger
BEFORE = 40  # characters before a number in which a word may say what it is
_DIALLED = re.compile(r"(?<![\w.,:+-])00(?=[1-9]\d{0,2}[ ()./-]?[1-9(])")
_TRIGGER = re.compile(r"\d(?:[\s().\-/\u2010-\u2015]{0,3}\d){6}")
CALLS = re.compile(
    r"(?<![^\W_])(?:(?:tele)?(?:phone|fon[eo]?)|tel|call|mobi|cell|fax|whatsapp|contact|reach|sms|dial|hotline|"
    r"ligue|me liga|ligar|zap|celular|t[eé]l[eé]f|m[oó]vil|ll[aá]m|t[eé]l|portable|appel|joindre|handy|ruf|"
    r"anruf|durchwahl|rückruf|"
    r"chiam|komórk|zadzwoń|dzwoń|numer tel|nr tel)|電話|携帯|連絡先|ご連絡|тел|手机|电话|전화",
    re.IGNORECASE,
)
# Words before numbers of goods and papers, which can have the form of a phone number or pass the checksum of cards.
COUNTED = re.compile(
    r"(?<![^\W_])(?:order|invoice|tracking|parcel|ticket|booking|reference|ref|shipment|serial|sku|isbn|issn|ean|doi|asin|upc|gtin|"
    r"version|population|bestell|rechnung|auftrag|sendung|paket|artikel|bevölkerung|pedido|encomenda|fatura|rastre|popula|factura|"
    r"env[ií]o|poblaci|commande|colis|facture|ordine|pacco|fattura|popolazione|zamówieni|przesyłk|paczk|faktur|ludność)\w*"
    r"(?:[ \t]+(?!\d)[\w.]{1,12}){0,2}[ \t]*[.:#°º-]*[ \t]*(?:\d[\d.,-]*[ \t]+(?!\d)\w{1,5}[ \t]+)?$|(?:注文|荷物|"
    r"伝票)\S{0,4}[ \t]*$",
    re.IGNORECASE,
)
# A dotted quad, a range of dates or pages.
_RANGE = re.compile(
    r"(?:\d{1,3}\.){3}\d{1,3}(?:/\d+)?|[^\u2013\u2014]*[\u2013\u2014][^\u2013\u2014]*|"
    r"\d\d/\d{4} - \d\d/\d{4}|.*\d \(\d{4}\).*"
)
# A range (09-17, 0830-0840), a CAS number, a number with thousands separators, a version (570.86.15).
_NO_PHONE = re.compile(
    rf"{_RANGE.pattern}|(\d\d|\d{{4}})-(\d\d|\d{{4}})|\d{{2,7}}-\d\d-\d|\d\d-\d\d-\d{{4}}|(\d{{3,6}})-\d{{3,6}}|"
    r"\d{1,3}(?:([ .,'\u00a0\u202f])\d{3})(?:\4\d{3})*|\d{1,3}\.\d{1,2}\.\d{1,3}"
)
_DECIMALS = re.compile(
    r"(?:\d+\s+)*\d+\.\d+(?:\s+\d+(?:\.\d+)?)*|.*\d /\s?\d+\.?\d*|\(?\d+\.\d+.* [-/] .*|\d+\.\d{3,}-.*|\(\d+\.\d+"
)
# A group of one digit that is not the first, years or a date as a group, the form of a CPF, an open bracket,
# a range, a fraction, more than five pairs of digits, letters.
_ODD = re.compile(
    rf"{_RANGE.pattern}|.*\d.*?(?<!\d)\d(?!\d).*|.*\. .*|.*(?<!\d)\d\d?/\d\d?|\(?(?:(?:19|20)\d\d\W+)+(?:19|20)\d\d\)?|"
    r".*\b(?:19|20)\d\d[01]\d[0-3]\d\b.*|\d{3}\.\d{3}\.\d{3}-\d\d|[^)]*\([^)]*|\d+ - \d+|[1-9]\d*/\d+|"
    r"(?:\d\d ){5,}\d\d|\d{0,6}[A-Za-z].*|.*\d\.\d+/\d+"
)
_GROUPED = re.compile(r"(?:\d[ .-])?\(?\d{2,5}\)?[ .-]?\d{3,5}[ .-]\d{3,5}")  # of a number that no region has
# The end of something longer: a fraction, a formula, a path, a version, a name or key with digits.
_INSIDE = re.compile(r"\d\.\Z|[\d.]\s*[-+*/=^×]\s*\Z|(?<!:/)(?<!wa\.me)/\Z|[A-Za-z0-9]\Z|[0-9a-f]-\Z")
_IN_COLUMN = re.compile(r"(?:[._=-]|\d[ ,])\Z")  # or after a sign that is no separator of numbers
_DATE = re.compile(
    r"\d{4}[-./][01]?\d[-./][0-3]?\d.*|(?:19|20)\d\d[01]\d[0-3]\d.*|[0-3]?\d[-./][01]?\d[-./](?:19|20)\d\d.*"
)


def parse_regions(text: str) -> tuple[str, ...]:
    """The regions of an option such as "US,BR,JP"."""
    return tuple(region.strip().upper() for region in text.split(",") if region.strip())


class PhoneFinder:
    """Finds phone numbers with a country code, and those of some regions without one.

    Raises:
        DataError: libphonenumber does not know a region.
        ImportError: phonenumbers is not installed.
    """

    def __init__(self, regions: Sequence[str]) -> None:
        import phonenumbers

        self._library = phonenumbers
        unknown = [region for region in regions if region not in phonenumbers.SUPPORTED_REGIONS]
        if unknown or not regions:
            raise DataError(
                f"--phone-regions names {', '.join(unknown) or 'no region'}, wanted codes of ISO 3166 such as US,BR,JP"
            )
        self._regions = regions

    def find(self, text: str) -> Iterator[Finding]:
        """Yield the phone numbers in the text."""
        for start, stop in find_windows(_TRIGGER, text, MARGIN, wanted=_may_be_phone):
            window = text[start:stop]
            seen: set[tuple[int, int]] = set()
            for region in self._regions:
                for match in self._library.PhoneNumberMatcher(window, region, leniency=0):
                    span = start + match.start, start + match.end
                    if span not in seen and is_phone(text, *span, self._library.is_valid_number(match.number)):
                        seen.add(span)
                        yield Finding("PHONE", *span)
            yield from self._find_dialled(text, start, stop)

    def _find_dialled(self, text: str, start: int, stop: int) -> Iterator[Finding]:
        """Yield numbers whose country code follows the 00 that many countries dial in place of the +."""
        window = _DIALLED.sub(" +", text[start:stop])
        if window == text[start:stop]:
            return
        for match in self._library.PhoneNumberMatcher(window, None, leniency=0):
            low, high = start + match.start - 1, start + match.end
            if not text.startswith("00", low) or not self._library.is_valid_number(match.number):
                continue
            before = text[max(0, low - BEFORE) : low]
            if CALLS.search(before) or not text[low:high].isdigit() and not COUNTED.search(before):
                yield Finding("PHONE", low, high)


def _may_be_phone(digits: re.Match[str]) -> bool:
    """Whether `is_phone` can accept digits like these. The matcher is slow, and most digits are counts and"""
    """fractions."""
    text, start = digits.string, digits.start()
    before = text[max(0, start - 2) : start]
    if before.endswith("+"):
        return True
    if _INSIDE.search(before):
        return False
    formed = re.search(r"[^\d.]|\..*\.", digits[0]) and not _IN_COLUMN.search(before)
    return bool(formed or CALLS.search(text, max(0, start - BEFORE), start))


def is_phone(text: str, start: int, end: int, valid: bool) -> bool:
    """Whether digits of the length of a phone number are one.

    A valid number begins with +, or has the form of a phone number; in one piece or in groups of thousands, it is one
    only after a word such as "call". A number that no region has (many are reserved for films) is one only with its
    country code and separators, or after such a word.
    """
    value, before = text[start:end], text[max(0, start - BEFORE) : start]
    digits = sum(c.isdigit() for c in value)
    if value.startswith("+"):
        return valid or digits >= 10 and bool(re.search(r"\d[ ().-]+\d", value))
    if (
        not 7 <= digits <= 12
        or _ODD.fullmatch(value)
        or _INSIDE.search(before)
        or _DATE.fullmatch(value)
        or _DECIMALS.fullmatch(value)
    ):
        return False
    if CALLS.search(before):
        return valid or bool(_GROUPED.fullmatch(value)) and not _NO_PHONE.fullmatch(value)
    if COUNTED.search(before) or value.startswith("[") or _IN_COLUMN.search(before):
        return False
    return valid and not (_NO_PHONE.fullmatch(value) or value.isdigit())
