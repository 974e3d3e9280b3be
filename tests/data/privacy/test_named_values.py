"""Numbers, dates and addresses that are private after their name; and what has the same form and is not."""

from __future__ import annotations

import pytest

from eagle_plugin.learning.data.privacy.patterns import Finding
from eagle_plugin.learning.data.privacy.scanner import Scanner

ETHER = "0x" + "049fc0afe533ec12e17e" * 2
HEX = "0a1b2c3d4e5f6a7b" * 4
WORDS = "ripple canyon ladder orbit velvet tiger maple frozen anchor puzzle salad ghost"
PUTTY = "PuTTY-User-" + "Key-File-3: ssh-ed25519\nEncryption: none\nPublic-Lines: 1\n" + HEX
PUTTY += f"\nPrivate-Lines: 1\n{HEX}\nPrivate-MAC: {HEX}"
FOUND = [
    ("PASSPORT", "Passport No: K4820917", "K4820917"),
    ("PASSPORT", '"guestPassportNumber": "C01X00T47"', "C01X00T47"),
    ("PASSPORT", "Reisepass CFGH12R5J", "CFGH12R5J"),
    ("VEHICLE_PLATE", "license plate 7KLM294", "7KLM294"),
    ("VEHICLE_PLATE", "Kfz-Kennzeichen: HH-KL 2043", "HH-KL 2043"),
    ("VEHICLE_PLATE", '"plate": "FG 482 LM"', "FG 482 LM"),
    ("BIRTH_DATE", "DOB 03/14/1987", "03/14/1987"),
    ("BIRTH_DATE", "userDob: 1979-11-23", "1979-11-23"),
    ("BIRTH_DATE", "date of birth: 22nd June 1968", "22nd June 1968"),
    ("BIRTH_DATE", "fecha de nacimiento: 14 de junio de 1983", "14 de junio de 1983"),
    ("BIRTH_DATE", "生年月日:1990年4月12日", "1990年4月12日"),
    ("MEDICAL_RECORD", "MRN# 4417093", "4417093"),
    ("MEDICAL_RECORD", '"patient_id": "MR-7730184"', "MR-7730184"),
    ("BANK_ACCOUNT", "acct no. 7700341925", "7700341925"),
    ("BANK_ACCOUNT", "Kontonummer: 0532 0130 00", "0532 0130 00"),
    ("WALLET", f"payout wallet: {ETHER}", ETHER),
    ("WALLET", "pay 1BoatSLRHtKNngkdXEeobR76b53LETtpyT", "1BoatSLRHtKNngkdXEeobR76b53LETtpyT"),
    ("SECRET", f"Seed phrase: {WORDS}", WORDS),
    ("SECRET", "Cookie: lang=en; session=0a1b2c3d4e5f6a7b8c9d0e1f", "0a1b2c3d4e5f6a7b8c9d0e1f"),
    ("URL_SIGNATURE", f"https://b/x?X-Amz-Expires=9&X-Amz-Signature={HEX}&y=1", HEX),
    ("URL_SIGNATURE", f'"X-Amz-Signature": "{HEX}"', HEX),
    ("PRIVATE_KEY", f"my key\n{PUTTY}\nok?", PUTTY),
    ("PHONE", "ring 0049 30 26047715 today", "0049 30 26047715"),
    ("PHONE", "Tel. 0033147205518", "0033147205518"),
    ("JP_MY_NUMBER", "マイナンバーは621498320257です", "621498320257"),
    ("JP_MY_NUMBER", '{"my_number": "621498320257"}', "621498320257"),
    ("DE_TAX_ID", '{"steuer_id": "36574261809"}', "36574261809"),
]
NOT_FOUND = [
    "passport_required: true, plate_count: 14, account_type: savings",
    "a passport costs 60 EUR, and 482091 were issued",
    "plate tectonics of 2019, home plate: 60 feet",
    "Einstein was born on 14 March 1879; date of birth: 14 March 1879",
    "date of birth (dd.mm.yyyy), MRN: text, DOB: date",
    "account number: 1234567890, MRN: 00000000",
    "account 4400 is revenue; account number format #,##0.00",
    f"contract wallet at {ETHER}",
    f"the hash is {ETHER}",
    "1BoatSLRHtKNngkdXEeobR76b53LETtpyU fails the check of wallets",
    "the seed phrase: twelve words of a list",
    "?X-Amz-Signature=SIGNATURE&X-Amz-Expires=900",
    "order 0049 30 26047715, dial 0049 for Germany",
    "my_number: 621498320258 fails its check digit",
    "session=requests.Session()",
    "Driver 570.86.15",
]


@pytest.mark.parametrize(("type", "text", "value"), FOUND, ids=[f"{i}-{case[0]}" for i, case in enumerate(FOUND)])
def test_a_named_value_is_found_whole(type: str, text: str, value: str, scanner: Scanner) -> None:
    start = text.index(value)
    assert scanner.find(text) == [Finding(type, start, start + len(value))]


@pytest.mark.parametrize("text", NOT_FOUND)
def test_what_has_the_form_only_is_not_found(text: str, scanner: Scanner) -> None:
    assert scanner.find(text) == []
