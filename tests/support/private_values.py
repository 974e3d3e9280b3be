"""Private data of every type that the filter knows: a type, the words before the value, and the value. All invented.

Identity numbers are the examples of python-stdnum. Keys are joined from parts, so that secret scanners do not report
this file.
"""

from __future__ import annotations

from eagle_plugin.learning.data.privacy import identity_numbers, recognisers, scanner

_NOISE = "aB3dE6gH9kL2"
_PEM = "-----BEGIN " + "PRIVATE KEY-----\n" + "MIIEvQIBADANBgkqhkiG\n" * 3 + "-----END " + "PRIVATE KEY-----"
VALUES = [
    ("EMAIL", "write to ", "anna.berg@firma.de"),
    ("EMAIL", "write to ", "jane.doe at gmail dot com"),
    ("PHONE", "call ", "+1 415-732-6094"),
    ("CREDIT_CARD", "my card ", "4111 1111 1111 1111"),
    ("IBAN", "IBAN ", "DE89370400440532013000"),
    ("IP_ADDRESS", "from ", "203.0.113.77"),
    ("US_SSN", "SSN ", "536-22-8714"),
    ("STREET_ADDRESS", "I live at ", "742 Evergreen Terrace, Springfield, OR 97477"),
    ("SECRET", "password: ", "vT9#kLq2!x"),
    ("URL_CREDENTIALS", "open postgres://", "ann:tr4nquil"),  # and @db/app, see `sentence`
    ("PRIVATE_KEY", "my key\n", _PEM),
    ("JWT", "Cookie: ", "eyJ" + "hbGciOiJIUzI1NiJ9." + "eyJ" + "zdWIiOiJ4In0." + "c2lnbmF0dXJlLW9mLXg"),
    ("AWS_KEY", "id ", "AKIA" + "IOSFODNN7EXAMPL2"),
    ("GOOGLE_KEY", "maps ", "AI" + "za" + (_NOISE * 3)[:35]),
    ("AZURE_KEY", "storage AccountKey=", _NOISE * 4 + "=="),
    ("GITHUB_TOKEN", "use ", "gh" + "p_" + _NOISE * 3),
    ("GITLAB_TOKEN", "use ", "gl" + "pat-" + _NOISE * 2),
    ("SLACK_TOKEN", "use ", "xo" + "xb-" + _NOISE * 2),
    ("ANTHROPIC_KEY", "use ", "sk" + "-ant-" + _NOISE * 2),
    ("OPENAI_KEY", "use ", "sk" + "-proj-" + _NOISE * 2),
    ("HF_TOKEN", "use ", "h" + "f_" + _NOISE * 3),
    ("STRIPE_KEY", "use ", "sk" + "_live_" + _NOISE * 2),
    ("PYPI_TOKEN", "use ", "pypi-" + "AgEIcHlwaS" + _NOISE * 5),
    ("NPM_TOKEN", "use ", "np" + "m_" + _NOISE * 3),
    ("SENDGRID_KEY", "use ", "S" + "G." + (_NOISE * 2)[:22] + "." + (_NOISE * 4)[:43]),
    ("URL_SIGNATURE", "get https://b/x?X-Amz-Signature=", "0a1b2c3d4e5f6a7b" * 4),
    ("PASSPORT", "passport no. ", "K4820917"),
    ("VEHICLE_PLATE", "licence plate: ", "AB-123-CD"),
    ("BIRTH_DATE", "date of birth: ", "1979-11-23"),
    ("MEDICAL_RECORD", "MRN: ", "00482917"),
    ("BANK_ACCOUNT", "account number: ", "4820019375"),
    ("WALLET", "pay ", "1BoatSLRHtKNngkdXEeobR76b53LETtpyT"),
    ("AR_CUIT", "cuit: ", "20-05536168-2"),
    ("AT_SVNR", "svnr: ", "1237010180"),
    ("AU_TFN", "tfn: ", "123 456 782"),
    ("BE_NN", "rijksregister: ", "85073003328"),
    ("BR_CNPJ", "cnpj: ", "16.727.230/0001-97"),
    ("BR_CPF", "cpf: ", "390.533.447-05"),
    ("CA_SIN", "SIN: ", "123-456-782"),
    ("CH_AHV", "ahv: ", "7569217076985"),
    ("CL_RUT", "RUT: ", "76086428-5"),
    ("CN_RIC", "身份证: ", "360426199101010071"),
    ("CZ_RC", "rodné číslo: ", "710319/2745"),
    ("DE_TAX_ID", "steuerid: ", "36 574 261 809"),
    ("DK_CPR", "cpr: ", "211062-5629"),
    ("ES_NIE", "nie: ", "x-2482300w"),
    ("ES_NIF", "nif: ", "54362315K"),
    ("FI_HETU", "hetu: ", "131052-308T"),
    ("FR_NIR", "nir: ", "295109912611193"),
    ("HR_OIB", "oib: ", "33392005961"),
    ("ID_NIK", "nik: ", "3171011708450001"),
    ("IE_PPS", "pps: ", "6433435FW"),
    ("IL_ID", "teudat zehut: ", "039337423"),
    ("IN_AADHAAR", "aadhaar: ", "234123412346"),
    ("IN_PAN", "pan: ", "ACUPA7085R"),
    ("IT_FISCAL_CODE", "codice fiscale: ", "RCCMNL83S18D969H"),
    ("IT_VAT", "partita iva: ", "00743110157"),
    ("JP_MY_NUMBER", "マイナンバー: ", "6214 9832 0257"),
    ("KR_RRN", "rrn: ", "971013-1019901"),
    ("MX_CURP", "curp: ", "BOXW310820HNERXN09"),
    ("MX_RFC", "rfc: ", "VACE460910SX6"),
    ("MY_NRIC", "nric: ", "770305-02-1234"),
    ("NL_BSN", "bsn: ", "1112.22.333"),
    ("NO_FNR", "fødselsnummer: ", "151086 95088"),
    ("PL_NIP", "nip: ", "8567346215"),
    ("PL_PESEL", "pesel: ", "44051401359"),
    ("PT_NIF", "contribuinte: ", "501964843"),
    ("RO_CNP", "cnp: ", "1630615123457"),
    ("SE_PERSONNUMMER", "personnummer: ", "880320-0016"),
    ("TH_PIN", "เลขประจำตัวประชาชน: ", "1-2345-45678-78-1"),
    ("TR_TCKN", "tckn: ", "17291716060"),
    ("UK_NHS", "nhs: ", "943-476-5870"),
    ("UK_NINO", "nino: ", "JG103759A"),
    ("US_ITIN", "itin: ", "912-90-3456"),
    ("ZA_ID", "sa id: ", "7503305044089"),
]


def sentence(before: str, value: str) -> str:
    """A text with this value in it."""
    return f"Hello, {before}{value}" + ("@db/app" if before.endswith("://") else " and so on")


def known_types() -> set[str]:
    """Every type that the filter can find without a recogniser of the user."""
    types = {pattern.type for pattern in scanner._PATTERNS}
    types |= {number.type for number in identity_numbers.IDENTITY_NUMBERS}
    types |= {recogniser.type for recogniser in recognisers.load_recognisers()}
    return types | {"CREDIT_CARD", "PHONE", "STREET_ADDRESS"}  # which are not in a table
