"""Passwords, keys and tokens that are assigned to a name: `DB_PASSWORD=...`, `"senha": "..."`, `the password is ...`.

After the name of a password, nearly any value is one. What is not: stand-ins from manuals, code that reads a password
from elsewhere, types, and sentences about passwords.
"""

from __future__ import annotations

import math
import re
from collections import Counter

from eagle_plugin.learning.data.privacy.patterns import pattern

_NAME = (
    # "pass" only as the end of a name that is assigned to.
    r"""pass(?:word|wd|phrase|code|wort|(?<=["'_]pass)(?=\\?["']?[ \t]*[=:]))|"""
    r"pwd|senha|contrase[nñ]a|clave|mot[ _-]?de[ _-]?passe|mdp|kennwort|"
    r"parola[ _-]d['’ _-]ordine|has[lł]o|wachtwoord|l[oö]senord|пароль|密码|密碼|パスワード|비밀번호"
)
_NAMES = re.compile(_NAME, re.IGNORECASE)
_NEEDLES = (
    "password passwd passphrase passcode passwort pwd senha contrase clave passe mdp kennwort parola hasło haslo "
    "wachtwoord lösenord losenord пароль 密码 密碼 パスワード 비밀번호 _pass pass= pass: pass\" pass'"
)
_SUFFIX = r"(?:[_-](?:base|value|prod|dev|test|live|id))?"
_ASSIGN = r"(?:=>|:=|==?|:|：)"
# Words between the name and the colon of a label: "Senha do wifi: ...".
_GAP = r"(?P<gap>(?:[ \t]+(?!=)[\w'’.-]{1,16}){0,3}?)"
_QUOTED = r"""(?P<quote>["'`])(?P<value>(?:\\.|(?!(?P=quote))[^\n\\]){4,128})(?P=quote)"""
_VALUE = (
    r"""(?P<quote>["'`])?(?P<value>(?(quote)(?:(?!(?P=quote))[^\n]){4,128}|"""
    r"""[^\s"'`<>，。、][^\s"'`<>，。、]{2,254}[^\s"'`<>，。、,;.]))"""
    r"""(?(quote)(?P=quote)|(?=[,;.]*(?:[\s"'`<>，。、]|$))(?![ \t]*[(\[]))"""
)

_STAND_IN = re.compile(
    r"your|example|change.?(?:me|it)|placeholder|dummy|sample|redacted|insert|xxx|\*\*\*|\.\.\.|••|…"
    r"|\$[({]|%\(|^%[sdv]$|\{\{|#\{|^[<{\[]|://|^(?:\.{0,2}|~)/[\w./-]+$",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"\$(?:[A-Z_][A-Z0-9_]*|[a-z_]+\d?|[a-z]+(?:[A-Z][a-z]+)*)[;,)]*")
_TYPES = (
    "string str text char varchar bool boolean integer number object bytes optional any null none true false "
    "undefined required nullable hidden hash hashed bcrypt encrypted plaintext default secret token field input "
    "value variable name username email login user key data self this form request body config settings options "
    "admin root test guest postgres mysql env environ getenv process.env"
)
_JUDGEMENTS = (
    "invalid incorrect wrong missing expired accepted rejected forgotten weak strong correct needed unknown unset "
    "empty inválida invalida incorreta errada obrigatória obrigatorio fraca incorrecta inválido obligatoria "
    "obligatorio vacía requerida olvidada invalide incorrecte requis obligatoire refusé oublié faible ungültig "
    "falsch erforderlich errata vergessen pflichtfeld sbagliata obbligatoria obbligatorio dimenticata scaduta "
    "odrzucone nieprawidłowe wymagane błędne ongeldig verplicht"
)
_NO_VALUE = frozenset(f"{_TYPES} {_JUDGEMENTS}".split())
_FUNCTION_WORDS = re.compile(
    r"\b(?:is|are|was|not|must|too|the|your|be|least|and|or|should|does|with|has|have|please|enter|need|will|can|"
    r"não|deve|pas|est|doit|muss|nicht|ist|non|è|nie|jest|musi)\b",
    re.IGNORECASE,
)
_ABOUT = re.compile(
    r"sha-?\d|md5|base64|bcrypt|utf-?8|\b(?:aes|rsa|oauth)|^\d+-\w+$|^\d+[–-]\d+$|required\||min:|max:", re.I
)
_CODE = re.compile(
    r"[A-Za-z_$][\w$]*(?:(?:\.|->|::|\?\.)[A-Za-z_$][\w$]*)+[,;)\]}]*|[A-Za-z_.]{3,}[(\[].*|"
    r"\w+=.*|(?:[a-z]*_[a-z_]+|[A-Z]*_[A-Z_]+)\d?[,;)]*"
)
_LOWER_WORD = re.compile(r"[^\W\d_]{6,}")


def _is_password(match: re.Match[str]) -> bool:
    """Whether the value of an assignment is a password, by how strongly its form says so."""
    value, sign = match["value"], match["sign"]
    if sign is None:
        return _is_stated_password(value)
    if not _may_be_password(value):
        return False
    letters, digits = any(c.isalpha() for c in value), any(c.isdigit() for c in value)
    if match["quote"]:
        words = value.split()
        if len(words) > 1:
            return 3 <= len(words) <= 8 and not _FUNCTION_WORDS.search(value) and value[-1].isalnum()
        return letters or digits
    if _CODE.fullmatch(value) or not (letters or digits):
        return False
    if sign.strip().startswith(("=", ":=")):
        if sign == "=" and match["name"].isupper():  # of a shell or an environment file
            return True
        if sign == "=" and _is_whole_line(match, r"[\w.-]*"):  # of a file of settings
            return bool(_LOWER_WORD.fullmatch(value)) or digits
        return (
            digits
            and len(value) >= 6
            and not value.isdigit()
            and value[-1] not in "()"
            and match.string[match.end() : match.end() + 1] != ","
        )
    if digits:
        return len(value.rstrip(")]}")) >= 6 or letters
    special = sum(not c.isalnum() for c in value.rstrip(".,;:!?)"))
    if special or match["gap"]:
        return special > 0 and letters and not match["gap"] and not re.fullmatch(r"[\w-]+[,;.)]*", value)
    # A word: only as the whole value of a label at the start of its line.
    return _is_whole_line(match, r"[\s*•>#-]*") and bool(_LOWER_WORD.fullmatch(value))


def _is_whole_line(match: re.Match[str], before: str) -> bool:
    """Whether a line has only the match, and before it what the expression allows."""
    text, (start, end) = match.string, match.span()
    start = max(text.rfind("\n", 0, start) + 1, start - 80)
    return (
        bool(re.fullmatch(before, text[start : match.start()])) and not text[end : end + 40].partition("\n")[0].strip()
    )


def _is_stated_password(value: str) -> bool:
    """The value of "the password is ...": letters with digits or with signs, because a sentence may go on here."""
    value = value.rstrip(".,;:!?)")
    mixed = any(c.isalpha() for c in value) and (
        any(c.isdigit() for c in value) or re.search(r"[^\W_][^\w\s.'’/-]", value) is not None
    )
    return mixed and len(value) >= 6 and " " not in value and _may_be_password(value) and not _CODE.fullmatch(value)


def _may_be_password(value: str) -> bool:
    bare = value.rstrip(".,;:!?)]}")
    if len(bare) < 4 or _STAND_IN.search(value) or bare.lower() in _NO_VALUE or _ABOUT.search(value):
        return False
    # "new_password" and password2 are variables; Password123 is a password that people use.
    if _VARIABLE.fullmatch(value):
        return False
    return not _NAMES.search(value) or bool(re.search(r"\d\d", value))


_CLASSES = tuple(map(re.compile, (r"[a-z]", r"[A-Z]", r"\d", r"[^A-Za-z0-9]")))


def _bits(text: str) -> float:
    """Entropy of the characters, in bits per character."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())


def _is_key(match: re.Match[str]) -> bool:
    """A key or token rather than a name, a word or a stand-in such as YOUR_API_KEY.

    It has a digit, and: below 20 characters three kinds of characters; from 20 on two kinds and 3 bits per character.
    """
    value = match["value"]
    if re.search(r"\$|<", value) or _STAND_IN.search(value) or not re.search(r"\d", value) or value.isdigit():
        return False
    kinds = sum(bool(kind.search(value)) for kind in _CLASSES)
    return kinds >= 3 if len(value) < 20 else kinds >= 2 and _bits(value) >= 3


def _is_credential(match: re.Match[str]) -> bool:
    """A value of a header, and not the name of a variable: it has a digit, or letters of both cases mixed."""
    value = match["value"]
    if _STAND_IN.search(value) or value.lower() in _NO_VALUE:
        return False
    return any(c.isdigit() for c in value) or not re.fullmatch(
        r"[A-Za-z]?[a-z]*(?:[A-Z][a-z]+)*|[A-Z_]+|[a-z_.-]+", value
    )


# Each begins with a letter, not with an optional part: then the search for it is fast.
_KEY_NAME = (
    r"(?:secret(?:[_-]?(?:access)?[_-]?key)?|(?:api|access|auth|private|account|encryption|signing)[_-]?key|token)"
)
_LABEL = (
    rf"""(?P<name>{_NAME}){_SUFFIX}["'`*]{{0,3}}{_GAP}"""
    rf"(?:(?P<sign>[ \t]*{_ASSIGN}[ \t]*)(?:\*\*[ \t]+)?|[ \t]+(?:is|was|ist|lautet|est|es|é|è|to|jest)[ \t:]+)"
)
# In a text whose escapes are not decoded, a quote with a backslash does not end the value.
QUOTED_PASSWORDS = (pattern("SECRET", _NEEDLES, _LABEL + _QUOTED, _is_password, re.IGNORECASE),)
PASSWORDS = (
    pattern("SECRET", _NEEDLES, _LABEL + _VALUE, _is_password, re.IGNORECASE),
    pattern(
        "SECRET",
        "secret key token",
        rf"""{_KEY_NAME}{_SUFFIX}["']?[ \t]*(?:=>|:=|=|:|\bis\b)[ \t]*["'`]?"""
        r"""(?P<value>[^\s"'`,;&<>()\[\]{}]{8,})(?![(\[])""",
        _is_key,
        re.IGNORECASE,
    ),
    pattern("SECRET", "bearer basic", r"\b(?:Bearer|Basic)\s+(?P<value>[\w.~+/-]{20,}=*)", _is_key, re.IGNORECASE),
    pattern(
        "SECRET",
        "authorization",
        r"""authorization["']?[ \t]*[:=][ \t]*["']?(?:Bearer|Basic|Token|ApiKey)[ \t]+(?P<value>[\w.~+/-]{8,}=*)""",
        _is_credential,
        re.IGNORECASE,
    ),
    pattern(
        "SECRET",
        "sess sid auth remember",
        r"(?<![A-Za-z0-9])(?:\w{0,12}sess(?:ion)?(?:[_-]?id)?|connect\.sid|\w{0,12}[_-]sid|sid|auth|remember(?:[_-]token)?)="
        r"(?P<value>[\w%.~+/-]{16,}=*)(?![(\[])",
        _is_key,
        re.IGNORECASE,
    ),
)
