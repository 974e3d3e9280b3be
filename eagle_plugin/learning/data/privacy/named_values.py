"""Numbers of papers, cars, patients and accounts, dates of birth and wallets.

Most of them have a form that many other numbers have too. So they are found only after their name: `Passport No: ...`,
`"dob": "..."`, `Kennzeichen: ...`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from eagle_plugin.learning.data.privacy.patterns import Pattern, pattern

# A name may be a part of another one: `guest_passport`, `userDob`.
_BEGIN = r"(?:(?<![^\W_])|(?-i:(?<=[a-z])(?=[A-Z])))"
_NUMBER = r"(?:[ _-]?(?:number|num|no|nr|n[º°]|id)\b\.?)?"
_SIGN = r"[ \t]*(?:=>|:=|[:=：#]|\t|\b(?:is|ist|es|est|è|é|to|lautet)\b)"
_QUOTES = r"""["'`*]{0,3}"""
_END = r"(?![^\W_]|[.,/-]\d)"


def _named(
    type: str,
    needles: str,
    names: str,
    form: str,
    accept: Callable[[re.Match[str]], bool] = bool,
    sign: bool = True,
) -> Pattern:
    """A pattern of a name and a value; the value needs a sign such as a colon before it if `sign` is true."""
    between = rf"{_NUMBER}{_QUOTES}{_SIGN}{'' if sign else '?'}[ \t]*{_QUOTES}[ \t]*"
    return pattern(type, needles, rf"{_BEGIN}(?:{names}){between}(?P<value>{form}){_END}", accept, flags=re.IGNORECASE)


def _digits(match: re.Match[str]) -> int:
    return sum(c.isdigit() for c in match["value"])


def _is_passport(match: re.Match[str]) -> bool:
    return _digits(match) >= 3


def _is_plate(match: re.Match[str]) -> bool:
    """5 to 9 letters and digits, at least two of them digits and one a letter."""
    signs = re.sub(r"[^A-ZÄÖÜ0-9]", "", match["value"])
    return 5 <= len(signs) <= 9 and _digits(match) >= 2 and not signs.isdigit()


_STAND_IN = re.compile(r"0*123456789\d*|(\d)\1*")


def _is_number(match: re.Match[str]) -> bool:
    digits = re.sub(r"\D", "", match["value"])
    return len(digits) >= 5 and not _STAND_IN.fullmatch(digits)


_YEAR = r"(?:19|20)\d\d"
_MONTH = r"[A-Za-zÀ-ÿ]{3,10}\.?"
_DATE = (
    rf"{_YEAR}[./-][01]?\d[./-][0-3]?\d|[0-3]?\d[./ -][0-3]?\d[./ -](?:{_YEAR}|\d\d)|"
    rf"[0-3]?\d(?:st|nd|rd|th|\.|º)?(?:[ -](?:of|de))?[ -]{_MONTH}(?:[ -]de)?,?[ -]{_YEAR}|"
    rf"{_MONTH}[ ][0-3]?\d(?:st|nd|rd|th)?,?[ ]{_YEAR}|{_YEAR}年\d\d?月\d\d?日|{_YEAR}[01]\d[0-3]\d"
)
_PLATE = r"(?-i:[A-ZÄÖÜ0-9]{1,4}(?:[ ·.-]?[A-Z0-9]{1,4}){1,3})"
NAMED_VALUES = (
    _named(
        "PASSPORT",
        "pass pasaporte paszport パスポート 护照",
        r"passport|reisepass(?:nummer|-?nr\.?)?|passnummer|pass-nr\.?|(?:n° de |num[ée]ro de )?passeport|pasaporte|"
        r"passaporto?e?|paszport\w{0,3}|パスポート(?:番号)?|护照(?:号码?)?",
        r"(?-i:[A-Z0-9]{6,10})",
        _is_passport,
        sign=False,
    ),
    _named(
        "VEHICLE_PLATE",
        "plate registration kennzeichen immatriculation rejestracyjn",
        r"(?:licen[cs]e|number|registration)[ _-]?plates?|vehicle[ _-]reg(?:istration)?(?:[ _-]mark)?|"
        r"(?:kfz-?|auto)?kennzeichen|immatriculation|(?:numer|tablica) rejestracyjn[ya]",
        _PLATE,
        _is_plate,
        sign=False,
    ),
    _named(
        "VEHICLE_PLATE",
        "plate plaque matr placa targa ナンバー 车牌",
        r"plate|plaque|matr[ií]cula|placa|targa|ナンバー(?:プレート)?|车牌(?:号码?)?",
        _PLATE,
        _is_plate,
    ),
    _named(
        "BIRTH_DATE",
        "dob d.o.b birth geburt geb. naissance nacimiento nascimento nascita urodzenia 生年月日 出生日期",
        r"dob|d\.o\.b\.?|(?:date|day)[ _-]?of[ _-]?birth|birth[ _-]?(?:date|day)|geburts(?:datum|tag)|geb\.[ -]?datum|"
        r"date de naissance|fecha de nacimiento|data de nascimento|data di nascita|data urodzenia|生年月日|出生日期",
        _DATE,
        sign=False,
    ),
    _named(
        "MEDICAL_RECORD",
        "mrn medical patient historia prontu dossier cartella カルテ 病历",
        r"mrn|medical[ _-]?record|patient[ _-]?(?:id|no|nr|number)|patienten-?(?:nummer|nr\.?|id)|historia cl[íi]nica|"
        r"prontu[áa]rio|dossier (?:du )?(?:patient|m[ée]dical)|cartella clinica|カルテ番号|病历号",
        r"[A-Z]{0,4}-?\d[\dA-Z-]{3,12}",
        _is_number,
        sign=False,
    ),
    _named(
        "BANK_ACCOUNT",
        "acc konto compte cuenta conta rekening rachunku 口座番号 账号",
        r"(?:bank|checking|savings)[ _-]?(?:account|acct)|acc(?:oun)?t[ _-]?(?:number|num|no|nr)|acct|"
        r"konto(?:nummer|-?nr\.?)?|(?:num[ée]ro|n[°º]) de (?:compte|cuenta|conta)|cuenta bancaria|conta corrente|"
        r"numero (?:di|del) conto|rekeningnummer|numer (?:konta|rachunku)|口座番号|账号",
        r"\d(?:[ -]?\d){5,19}",
        _is_number,
        sign=False,
    ),
)
_WALLET_NAME = re.compile(
    r"wallet|payout|deposit|withdraw|\beth(?:ereum)?\b|metamask|send(?:ing)? (?:it )?to|tip jar", re.I
)
_CONTRACT = re.compile(r"contract|token|constant|address\(", re.I)
_BEFORE = 60  # characters before a wallet in which its name may be


def _is_bitcoin(match: re.Match[str]) -> bool:
    from stdnum import bitcoin

    return bool(bitcoin.is_valid(match[0]))


def _is_wallet(match: re.Match[str]) -> bool:
    """An address of Ethereum is also that of a program, which is public: only the words before it tell."""
    before = match.string[max(0, match.start() - _BEFORE) : match.start()]
    return bool(_WALLET_NAME.search(before)) and not _CONTRACT.search(before)


WALLETS = (
    pattern("WALLET", "1 3", r"(?<![^\W_])[13][1-9A-HJ-NP-Za-km-z]{25,34}(?![^\W_])", _is_bitcoin),
    pattern("WALLET", "bc1", r"(?<![^\W_])bc1[ac-hj-np-z02-9]{11,71}(?![^\W_])", _is_bitcoin, flags=re.IGNORECASE),
    pattern("WALLET", "0x", r"(?<![^\W_])0x[0-9a-fA-F]{40}(?![^\W_])", _is_wallet),
    pattern(
        "SECRET",
        "seed recovery mnemonic",
        rf"(?:(?:seed|recovery)[ _-]?(?:phrase|words)|mnemonic){_QUOTES}[ \t]*[:=]\s*{_QUOTES}"
        r"(?P<value>(?:[a-z]{3,8}[ ,]{1,2}){11,23}[a-z]{3,8})(?![^\W_])",
        flags=re.IGNORECASE,
    ),
)
