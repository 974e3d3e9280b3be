"""E-mail addresses that are spelled for readers: "name at domain dot com", "name [at] domain [dot] com"."""

from __future__ import annotations

import re

from eagle_plugin.learning.data.privacy.patterns import pattern

_AT = r"at|ät|arroba|arobase|chiocciola|małpa|@"
_DOT = r"dot|punkt|ponto|punto|point|kropka"
_LABEL = r"[^\W_](?:[\w-]{0,62})"
_NAME_PART = r"[\w+-]{1,64}"
_LOCAL = (
    rf"{_NAME_PART}(?:(?:\.|[ \t]+(?:dot|ponto|punto|point|punkt|kropka)[ \t]+|"
    rf"[ \t]*[\[({{][ \t]*(?:dot|\.)[ \t]*[\])}}][ \t]*){_NAME_PART}){{0,4}}"
)
_BRACKETED_DOT = rf"[ \t]*[\[({{<][ \t]*(?:{_DOT}|\.)[ \t]*[\])}}>][ \t]*"
_WEBMAIL = (
    "gmail|googlemail|yahoo|hotmail|outlook|icloud|proton(?:mail)?|gmx|web|live|aol|yandex|wp|onet|libero|orange|uol"
)
_TOP_LEVEL = "com net org edu gov mil int info biz name dev app online cloud email xyz shop site tech"
# What is in place of a name in "have a look at example dot com".
_NO_NAMES = (
    "look looks looked looking available hosted found website site page me us it them is are was be work works worked "
    "based live lives sold visit here there online that this one contact not and or email mail reach us out"
)
_COMMON, _NO_LOCAL = frozenset(_TOP_LEVEL.split()), frozenset(_NO_NAMES.split())


def _is_address(match: re.Match[str]) -> bool:
    """The last label is a top-level domain, and the word before "at" can be a name."""
    last = re.split(r"[^\w-]+", match[0].rstrip(" \t"))[-1].lower() or match[0]
    top = last in _COMMON or len(last) == 2 and last.isalpha()
    return top and match["local"].lower() not in _NO_LOCAL


SPELLED_EMAILS = (
    pattern(
        "EMAIL",
        "[at (at {at <at [ät (ät at] at) arroba) arroba] arobase) chiocciola) małpa) (@ [@",
        rf"(?<![\w.])(?P<local>{_LOCAL})[ \t]*[\[({{<][ \t]*(?:{_AT})[ \t]*[\])}}>][ \t]*"
        rf"{_LABEL}(?:(?:\.|{_BRACKETED_DOT}|[ \t]+(?:{_DOT})[ \t]+){_LABEL})+",
        _is_address,
        re.IGNORECASE,
    ),
    pattern(
        "EMAIL",
        "dot punkt",
        rf"(?<![\w.])(?P<local>{_LOCAL})[ \t]+at[ \t]+{_LABEL}(?:(?:[ \t]+(?:dot|punkt)[ \t]+|\.){_LABEL})*"
        rf"[ \t]+(?:dot|punkt)[ \t]+{_LABEL}",
        _is_address,
        re.IGNORECASE,
    ),
    pattern(
        "EMAIL",
        "arroba arobase chiocciola małpa",
        rf"(?<![\w.])(?P<local>{_LOCAL})[ \t]*\b(?:arroba|arobase|chiocciola|małpa)[ \t]+"
        rf"{_LABEL}(?:(?:[ \t]+(?:{_DOT})[ \t]+|\.){_LABEL})+",
        _is_address,
        re.IGNORECASE,
    ),
    pattern(
        "EMAIL",
        "gmail yahoo hotmail outlook icloud proton gmx web. live. aol yandex wp. onet libero orange uol",
        rf"(?<![\w.])(?P<local>{_LOCAL}) at (?:{_WEBMAIL})\.[a-z]{{2,3}}\b",
        _is_address,
        re.IGNORECASE,
    ),
)
