"""National identity and tax numbers: their forms are in one table, and python-stdnum checks their check digits.

To add a number, add one line to `IDENTITY_NUMBERS`: its type, the module of python-stdnum that checks it, its form,
what it is called, and the form (if there is one) that is so particular that it needs no name nearby.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eagle_plugin.learning.data.privacy.patterns import Finding, find_windows

BEFORE = 60  # characters before a number in which its name may be
AFTER = 30  # characters after it
MARGIN = 32  # characters on each side of a trigger; no number is longer
_START, _END = r"(?<![0-9A-Za-z_])(?<!\d[.,/-])", r"(?![0-9A-Za-z_])(?![.,/-]\d)"

# Around a name. Only Latin letters: in Japanese and other scripts the words of a sentence are not separated. In the
# names of fields a space is an underscore.
_NO_LATIN_BEFORE, _NO_LATIN_AFTER = r"(?<![0-9A-Za-z\u00c0-\u024f])", r"(?![0-9A-Za-z\u00c0-\u024f])"


@dataclass(frozen=True)
class IdentityNumber:
    """One kind of number, and how it is recognised."""

    type: str
    module: str  # of python-stdnum; "" for a number without a check digit
    form: re.Pattern[str]
    names: re.Pattern[str]  # one of them must be nearby, unless the number is in its particular form
    particular: re.Pattern[str] | None


def _number(type: str, module: str, form: str, names: str, particular: str | None = None) -> IdentityNumber:
    return IdentityNumber(
        type,
        module,
        re.compile(f"{_START}(?:{form}){_END}", re.IGNORECASE),
        re.compile(rf"{_NO_LATIN_BEFORE}(?:{names.replace(' ', '[ _-]')}){_NO_LATIN_AFTER}", re.IGNORECASE),
        re.compile(particular) if particular else None,
    )


_CURP = r"[A-Z]{4}\d{6}[HMX][A-Z]{5}[0-9A-Z]\d"
_FISCAL = r"[A-Z]{6}[\dLMNP-V]{2}[A-EHLMPRST][\dLMNP-V]{2}[A-Z][\dLMNP-V]{3}[A-Z]"
_NINO = (
    r"(?:QQ|(?!BG|GB|KN|NK|NT|TN|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z])( ?)\d\d\1\d\d\1\d\d\1[A-D]"  # NIM39110 of HMRC
)
_NIR = r"[12] ?\d\d ?\d\d ?(?:\d\d|2[AB]) ?\d{3} ?\d{3} ?\d\d"
# Three groups of four digits can be three years; a number of four groups can be a card.
_AADHAAR = r"(?!(?:(?:19|20)\d\d ){2})[2-9]\d{3} \d{4} \d{4}"
IDENTITY_NUMBERS = (
    _number("AR_CUIT", "ar.cuit", r"\d\d-?\d{8}-?\d", "cui[tl]", r"\d\d-\d{8}-\d"),
    _number("AT_SVNR", "at.vnr", r"\d{4} ?\d{6}", "svnr|sv-nummer|sozialversicherungsnummer"),
    _number("AU_TFN", "au.tfn", r"\d{3} ?\d{3} ?\d{2,3}", "tfn|tax file n(?:umber|o)"),
    _number(
        "BE_NN",
        "be.nn",
        r"\d\d\.?\d\d\.?\d\d-?\d{3}\.?\d\d",
        "rijksregister(?:nummer|nr)?|registre national|num[ée]ro national",
        r"\d\d\.\d\d\.\d\d-\d{3}\.\d\d",
    ),
    _number(
        "BR_CNPJ",
        "br.cnpj",
        r"[A-Z\d]{2}\.?[A-Z\d]{3}\.?[A-Z\d]{3}/?[A-Z\d]{4}-?\d\d",
        "cnpj",
        r"\w\w\.\w{3}\.\w{3}/\w{4}-\d\d",
    ),
    _number("BR_CPF", "br.cpf", r"\d{3}\.?\d{3}\.?\d{3}-?\d\d", "cpf", r"\d{3}\.\d{3}\.\d{3}-\d\d"),
    _number("CA_SIN", "ca.sin", r"\d{3}([ -]?)\d{3}\1\d{3}", "(?-i:SIN|NAS)|social insurance(?: number)?"),
    _number("CH_AHV", "ch.ssn", r"756\.?\d{4}\.?\d{4}\.?\d\d", "ahv|avs|ahv-nummer", r"756\.\d{4}\.\d{4}\.\d\d"),
    _number(
        "CL_RUT",
        "cl.rut",
        r"\d{1,2}\.?\d{3}\.?\d{3}-?[\dK]",
        "(?-i:RUT|RUN|R[.]U[.]T[.])|rut",
        r"\d{1,2}\.\d{3}\.\d{3}-[\dK]",
    ),
    _number("CN_RIC", "cn.ric", r"\d{17}[\dX]", "身份证号?码?|citizen id|resident id", r"\d{17}[\dX]"),
    _number("CZ_RC", "cz.rc", r"\d{6}/?\d{3,4}", "rodné číslo|rč|rc", r"\d{6}/\d{4}"),
    _number(
        "DE_TAX_ID",
        "de.idnr",
        r"[1-9]\d ?\d{3} ?\d{3} ?\d{3}",
        "steuer ?id(?:nr|entifikationsnummer)?|idnr|tin",
        r"\d\d \d{3} \d{3} \d{3}",
    ),
    _number("DK_CPR", "dk.cpr", r"\d{6}-?\d{4}", "cpr|cpr-?(?:nr|nummer)"),
    _number("ES_NIE", "es.nie", r"[XYZ][ -]?\d{7}[ -]?[A-Z]", "nie", r"[XYZ]-?\d{7}-?[A-Z]"),
    _number("ES_NIF", "es.nif", r"\d{8}[ -]?[A-Z]|[KLM]\d{7}[A-Z]", "[nc]if|dni", r"\d{8}-?[A-Z]"),
    _number(
        "FI_HETU", "fi.hetu", r"\d{6}[-+A-FU-Y]\d{3}[0-9A-Y]", "hetu|henkilötunnus", r"\d{6}[-+A]\d{3}[A-FHJ-NPR-Y]"
    ),
    _number("FR_NIR", "fr.nir", _NIR, r"nir|insee|s[ée]curit[ée] sociale|n° ?(?:de )?s[ée]cu", _NIR),
    _number("HR_OIB", "hr.oib", r"\d{11}", "oib"),
    _number("ID_NIK", "id.nik", r"\d{16}", "nik|ktp"),
    _number("IE_PPS", "ie.pps", r"\d{7}[A-W][A-IW]?", "ppsn?|pps n(?:umber|o)", r"\d{7}[A-W][A-IW]"),
    _number("IL_ID", "il.idnr", r"\d{9}", 'תעודת זהות|ת"ז|teudat zehut'),
    _number("IN_AADHAAR", "in_.aadhaar", r"[2-9]\d{3}([ -]?)\d{4}\1\d{4}", "aadh?aa?r|uid(?:ai)?|आधार", _AADHAAR),
    _number(
        "IN_PAN", "in_.pan", r"[A-Z]{5}\d{4}[A-Z]", "pan|permanent account n(?:umber|o)", r"[A-Z]{3}P[A-Z]\d{4}[A-Z]"
    ),
    _number("IT_FISCAL_CODE", "it.codicefiscale", _FISCAL, "codice fiscale|c\\.?f\\.?", _FISCAL),
    _number("IT_VAT", "it.iva", r"\d{11}", r"partita iva|p\.? ?iva"),
    _number("JP_MY_NUMBER", "jp.in_", r"\d{4}([ -]?)\d{4}\1\d{4}", "マイナンバー|個人番号|my ?number"),
    _number("KR_RRN", "kr.rrn", r"\d{6}-?[1-8]\d{6}", "주민(?:등록)?번호|rrn", r"\d{6}-[1-8]\d{6}"),
    _number("MX_CURP", "mx.curp", _CURP, "curp", _CURP),
    _number("MX_RFC", "mx.rfc", r"[A-ZÑ&]{3,4}-?\d{6}-?[A-Z0-9]{3}", "rfc"),
    _number("MY_NRIC", "my.nric", r"\d{6}-?\d\d-?\d{4}", "nric|mykad|kad pengenalan"),
    _number("NL_BSN", "nl.bsn", r"\d{9}|\d{4}[. ]\d\d[. ]\d{3}", "bsn|burgerservicenummer|sofinummer"),
    _number("NO_FNR", "no.fodselsnummer", r"\d{6} ?\d{5}", "fødselsnummer|personnummer|fnr"),
    _number("PL_NIP", "pl.nip", r"\d{3}-?\d{3}-?\d\d-?\d\d|\d{3}-\d\d-\d\d-\d{3}", "nip"),
    _number("PL_PESEL", "pl.pesel", r"\d{11}", "pesele?m?u?"),
    _number("PT_NIF", "pt.nif", r"[1-35689]\d\d ?\d{3} ?\d{3}", "nif|contribuinte"),
    _number("RO_CNP", "ro.cnp", r"[1-9]\d{12}", "cnp|cod numeric personal"),
    _number("SE_PERSONNUMMER", "se.personnummer", r"(?:\d\d)?\d{6}[-+]?\d{4}", "personnummer|personnr"),
    _number(
        "TH_PIN", "th.pin", r"\d-?\d{4}-?\d{5}-?\d\d-?\d", "เลขประจำตัวประชาชน|บัตรประชาชน", r"\d-\d{4}-\d{5}-\d\d-\d"
    ),
    _number("TR_TCKN", "tr.tckimlik", r"\d{11}", r"tckn|t\.?c\.? ?(?:kimlik|no).*|kimlik no"),
    _number("UK_NHS", "gb.nhs", r"\d{3}([ -]?)\d{3}\1\d{4}", "nhs|nhs n(?:umber|o)"),
    _number("UK_NINO", "", r"[A-Z]{2}( ?)\d\d ?\d\d ?\d\d\1[A-Z]", "nino|national insurance|ni n(?:umber|o)", _NINO),
    _number("US_ITIN", "us.itin", r"9\d\d-?\d\d-?\d{4}", "itin", r"9\d\d-\d\d-\d{4}"),
    _number("ZA_ID", "za.idnr", r"\d{6} ?\d{4} ?\d{3}", "sa id|(?:sa |south african )?id(?:entity)? n(?:umber|o)"),
)
# Six digits, or the end of an Italian fiscal code or an Indian PAN. All begin with a digit: the search is fast.
_TRIGGER = re.compile(r"\d(?:[ ./-]?\d){5}|\d\d[A-Za-z]\d\d[A-Za-z]\d{3}[A-Za-z]|\d{4}[A-Za-z](?!\w)")


def load_checks() -> dict[str, Callable[[str], bool]]:
    """The function that checks a number, for each module of python-stdnum in the table.

    Raises:
        ImportError: python-stdnum is not installed.
    """
    modules = {number.module for number in IDENTITY_NUMBERS if number.module}
    return {name: importlib.import_module(f"stdnum.{name}").is_valid for name in sorted(modules)}


def find_identity_numbers(checks: dict[str, Callable[[str], bool]], text: str) -> Iterator[Finding]:
    """Yield the numbers of the table that are in the text; of those at one place, first the ones that are named."""
    for start, stop in find_windows(_TRIGGER, text, MARGIN):
        unnamed = []
        for number in IDENTITY_NUMBERS:
            for match in number.form.finditer(text, start, stop):
                if number.module and not checks[number.module](match[0]):
                    continue
                low, high = match.span()
                near = f"{text[max(0, low - BEFORE) : low]}\n{text[high : high + AFTER]}"
                if number.names.search(near):
                    yield Finding(number.type, low, high)
                elif number.particular and number.particular.fullmatch(match[0]):
                    unnamed.append(Finding(number.type, low, high))
        yield from unnamed
