"""Regular expressions for what Presidio does not recognise: keys, tokens, credentials, street addresses."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
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
    accept: Callable[[str], bool] = bool  # a final check of the value


def find_patterns(text: str) -> Iterator[Finding]:
    """Yield the findings of all patterns, not ordered by position; they may overlap."""
    lower = text.lower()
    for pattern in PATTERNS:
        if any(needle in lower for needle in pattern.needles):
            group: str | int = "value" if "value" in pattern.regex.groupindex else 0
            for match in pattern.regex.finditer(text):
                if pattern.accept(match[group]):
                    yield Finding(pattern.type, *match.span(group))


def _bits(text: str) -> float:
    """Entropy of the characters, in bits per character."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())


_STAND_IN = re.compile(
    r"your|example|change.?me|placeholder|dummy|sample|redacted|insert|xxx|\*\*\*|\.\.\.|\$|<|%\(", re.I
)
_CLASSES = tuple(map(re.compile, (r"[a-z]", r"[A-Z]", r"\d", r"[^A-Za-z0-9]")))


def _looks_secret(value: str) -> bool:
    """A password or key rather than a name, a word or a stand-in such as YOUR_API_KEY.

    It has a digit, and: below 20 characters three kinds of characters; from 20 on two kinds and 3 bits per character.
    """
    if _STAND_IN.search(value) or not re.search(r"\d", value) or value.isdigit():
        return False
    kinds = sum(bool(kind.search(value)) for kind in _CLASSES)
    return kinds >= 3 if len(value) < 20 else kinds >= 2 and _bits(value) >= 3


def _is_real_password(value: str) -> bool:
    """Whether user:password is a real one, and not a stand-in from a manual."""
    password = value.partition(":")[2]
    words = ("password", "pass", "passwd", "pwd", "secret")
    return not _STAND_IN.search(value) and password.lower() not in words and not password.startswith("{")


def _has_digit(value: str) -> bool:
    return any(c.isdigit() for c in value)


_WORD = r"[A-Z][\w'.-]*"
_CITY = rf"(?:,[ \t]*{_WORD}(?: {_WORD})?)"
_UNIT = r"(?:,?[ \t]+(?:Apt|Apartment|Suite|Ste|Unit|Flat|#)\.?\s*\w+)"
_TAIL = rf"{_UNIT}?(?:{_CITY}(?:,?[ \t]+[A-Z]{{2}})?(?:[ \t]+\d{{5}}(?:-\d{{4}})?)?)?"
_STREET = (
    "Street|St|Avenue|Ave|Road|Rd|Boulevard|Blvd|Lane|Ln|Drive|Dr|Court|Ct|Terrace|Way|Place|Pl|Square|Parkway|Pkwy|"
    "Highway|Hwy|Circle|Crescent|Close|Row"
)
_SECRET_NAME = (
    r"(?:pass(?:word|wd|phrase)|pwd|(?:client|app|shared)?[_-]?secret(?:[_-]?(?:access)?[_-]?key)?|"
    r"(?:api|access|auth|private|account|encryption|signing)[_-]?key|(?:access|auth|api|bearer|refresh|session|id)?[_-]?token)"
    r"(?:[_-](?:base|value|prod|dev|test|live|id))?"
)


def _pattern(
    type: str, needles: str, regex: str, accept: Callable[[str], bool] = bool, flags: re.RegexFlag = re.NOFLAG
) -> Pattern:
    return Pattern(type, tuple(needles.split()), re.compile(regex, flags), accept)


_EDGE, _STOP = r"(?<![A-Za-z0-9_])", r"(?![A-Za-z0-9_])"
PATTERNS = (
    _pattern("AWS_KEY", "akia asia", rf"{_EDGE}(?:AKIA|ASIA)[A-Z0-9]{{16}}{_STOP}"),
    _pattern("GOOGLE_KEY", "aiza ya29. gocspx-", rf"{_EDGE}(?:AIza[\w-]{{35}}|ya29\.[\w-]{{20,}}|GOCSPX-[\w-]{{20,}})"),
    _pattern(
        "AZURE_KEY",
        "accountkey accesskey sig=",
        r"(?:AccountKey=|SharedAccessKey=|[?&]sig=)(?P<value>[A-Za-z0-9+/%]{40,}={0,2})",
    ),
    _pattern(
        "GITHUB_TOKEN", "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_", rf"{_EDGE}(?:gh[pousr]_\w{{36,}}|github_pat_\w{{50,}})"
    ),
    _pattern("GITLAB_TOKEN", "glpat-", rf"{_EDGE}glpat-[\w-]{{20,}}"),
    _pattern(
        "SLACK_TOKEN",
        "xox hooks.slack.com",
        rf"{_EDGE}xox[abeoprs]-[A-Za-z0-9-]{{10,}}|hooks\.slack\.com/services/[\w/]{{20,}}",
    ),
    _pattern("ANTHROPIC_KEY", "sk-ant-", rf"{_EDGE}sk-ant-[\w-]{{20,}}"),
    _pattern("OPENAI_KEY", "sk-", rf"{_EDGE}sk-(?!ant-)(?:proj-|svcacct-|admin-)?[\w-]{{20,}}", _has_digit),
    _pattern("HF_TOKEN", "hf_", rf"{_EDGE}hf_[A-Za-z0-9]{{30,}}{_STOP}"),
    _pattern("STRIPE_KEY", "_live_ _test_", rf"{_EDGE}[rs]k_(?:live|test)_[A-Za-z0-9]{{16,}}"),
    _pattern("PYPI_TOKEN", "pypi-ageichlwas", rf"{_EDGE}pypi-AgEIcHlwaS[\w-]{{50,}}"),
    _pattern("NPM_TOKEN", "npm_", rf"{_EDGE}npm_[A-Za-z0-9]{{36}}{_STOP}"),
    _pattern("SENDGRID_KEY", "sg.", rf"{_EDGE}SG\.[\w-]{{22}}\.[\w-]{{43}}"),
    _pattern("JWT", "eyj", rf"{_EDGE}eyJ[\w-]{{8,}}\.[\w-]{{4,}}\.[\w-]{{8,}}"),
    _pattern(
        "PRIVATE_KEY",
        "private key-----",
        # A key that was cut off has no end line; then the value is its base64 part.
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----"
        r"(?:[^-]*-----END [A-Z0-9 ]*PRIVATE KEY-----|(?:(?:\s|\\n)*[A-Za-z0-9+/=]{16,})*)",
    ),
    _pattern(
        "URL_CREDENTIALS",
        "://",
        r"""(?<=://)(?P<value>[^\s/:@"'<>\[\]{}$]{0,64}:[^\s/@"'<>]{1,128})(?=@)""",
        _is_real_password,
    ),
    _pattern(
        "SECRET",
        "pass pwd secret key token",
        rf"""{_SECRET_NAME}["']?[ \t]*(?:=>|:=|=|:|\bis\b)[ \t]*["'`]?"""
        r"""(?P<value>[^\s"'`,;&<>()\[\]{}]{8,})(?![(\[])""",
        _looks_secret,
        re.IGNORECASE,
    ),
    _pattern(
        "SECRET", "bearer basic", r"\b(?:Bearer|Basic)\s+(?P<value>[\w.~+/-]{20,}=*)", _looks_secret, re.IGNORECASE
    ),
    _pattern(
        "STREET_ADDRESS",
        " ".join(_STREET.lower().split("|")),
        rf"(?<![\w.])\d{{1,5}}[A-Za-z]?[ \t]+(?:{_WORD}[ \t]+){{1,4}}(?:{_STREET})\b\.?{_TAIL}",
    ),
    _pattern("STREET_ADDRESS", "box", rf"(?i:\bP\.?\s?O\.?\s?Box)\s+\d{{1,6}}{_TAIL}"),
    _pattern(
        "STREET_ADDRESS",
        "straße strasse str. platz allee gasse weg",
        r"\b[A-ZÄÖÜ][\w-]*(?:[Ss]traße|[Ss]trasse|[Ss]tr\.|platz|allee|gasse|weg)\s+\d{1,4}\s?[a-z]?\b(?:,?\s*\d{4,5}\s+[A-ZÄÖÜ]\w+)?",
    ),
    _pattern(
        "STREET_ADDRESS",
        "rue avenue boulevard place chemin impasse allée quai",
        r"\b\d{1,4}(?:\s?(?:bis|ter))?,?\s+(?:rue|avenue|boulevard|place|chemin|impasse|allée|quai)\s+(?:d[eu]s?\s+|l[ae]\s+|l')*"
        r"[A-ZÀ-Ý][\w'-]*(?:\s[A-ZÀ-Ý][\w'-]*)*(?:,?\s*\d{5}\s+[A-ZÀ-Ý][\w-]*)?",
    ),
)
