"""Texts that an earlier version of the filter got wrong: private values of many countries, and harmless look-alikes."""

from __future__ import annotations

import pytest

from eagle_plugin.learning.data.generate import main as generate
from eagle_plugin.learning.data.prepare import main as prepare
from eagle_plugin.learning.data.privacy.identity_numbers import IDENTITY_NUMBERS, load_checks
from eagle_plugin.learning.data.privacy.redact import redact
from eagle_plugin.learning.data.privacy.scanner import Scanner
from eagle_plugin.learning.data.rows import DataError

FOUND = [
    ("BR_CPF", "CPF: 529.982.247-25", "529.982.247-25"),
    ("BR_CPF", '{"cpf": "52998224725"}', "52998224725"),
    ("BR_CNPJ", "emitida para 11.222.333/0001-81.", "11.222.333/0001-81"),
    ("ES_NIF", "con DNI 12345678Z", "12345678Z"),
    ("ES_NIE", "X1234567L", "X1234567L"),
    ("FR_NIR", "n° de sécu 2 69 05 49 588 157 80", "2 69 05 49 588 157 80"),
    ("DE_TAX_ID", "Meine Steuer-ID ist 36574261809", "36574261809"),
    ("DE_TAX_ID", "36 574 261 809", "36 574 261 809"),
    ("UK_NINO", "NINO JG 10 37 59 A", "JG 10 37 59 A"),
    ("IT_FISCAL_CODE", "RCCMNL83S18D969H", "RCCMNL83S18D969H"),
    ("PL_PESEL", "PESEL 44051401359", "44051401359"),
    ("IN_AADHAAR", "aadhaar no: 2341 2341 2346", "2341 2341 2346"),
    ("SECRET", "MYSQL_ROOT_PASSWORD=hunter2hunter2", "hunter2hunter2"),
    ("SECRET", "DB_PASSWORD=abc12345", "abc12345"),
    ("SECRET", '{"user": "ana", "password": "correct horse battery staple"}', "correct horse battery staple"),
    ("SECRET", r"{\"password\": \"tr4nquil\"}", "tr4nquil"),
    ("SECRET", "senha: girassol42", "girassol42"),
    ("SECRET", "Passwort: Sommer2024", "Sommer2024"),
    ("SECRET", "mot de passe : azerty123", "azerty123"),
    ("SECRET", "contraseña: miperro2020", "miperro2020"),
    ("SECRET", "Senha do wifi: girassol42", "girassol42"),
    ("SECRET", "password: letmein", "letmein"),
    ("SECRET", "spring.datasource.password=letmein", "letmein"),
    ("SECRET", "mein Passwort lautet Sommer24, danke", "Sommer24"),
    ("EMAIL", "write to jane.doe at gmail dot com", "jane.doe at gmail dot com"),
    ("EMAIL", "jane [at] firma [dot] de", "jane [at] firma [dot] de"),
    ("EMAIL", "ana arroba empresa ponto com ponto br", "ana arroba empresa ponto com ponto br"),
    ("EMAIL", "jürgen@müller-söhne.de", "jürgen@müller-söhne.de"),
    ("EMAIL", "иван@почта.рф", "иван@почта.рф"),
    ("PHONE", "ligue (11) 98765-4321", "(11) 98765-4321"),
    ("PHONE", "090-1234-5678", "090-1234-5678"),
    ("PHONE", "call 555-123-4567", "555-123-4567"),
    ("STREET_ADDRESS", "moro na Rua das Flores, 123", "Rua das Flores, 123"),
    ("STREET_ADDRESS", "Av. Paulista, 1578", "Av. Paulista, 1578"),
    ("STREET_ADDRESS", "Calle Mayor 12, 28013 Madrid", "Calle Mayor 12, 28013 Madrid"),
    ("STREET_ADDRESS", "vive en C/ Alcalá 45", "C/ Alcalá 45"),
    ("STREET_ADDRESS", "abito in Via Garibaldi 7", "Via Garibaldi 7"),
    ("STREET_ADDRESS", "Carrera 7 # 72-41", "Carrera 7 # 72-41"),
    ("URL_CREDENTIALS", "postgres://user:pw@db.firma.com/app", "user:pw"),
    ("CREDIT_CARD", "Mastercard 2223003122003222", "2223003122003222"),
]
NOT_FOUND = [
    "CPF 529.982.247-26, DNI 12345678A, PESEL 44051401358, Steuer-ID 36574261890",
    "52998224725 and 44051401359 are numbers of nothing",
    "the years 2018 2019 2020",
    "@gargron@mastodon.social",
    "ISBN 0-306-40615-2, ISBN-10: 0306406152",
    "a population of 83,190,556; 83 190 556; 83.190.556",
    "order 4539578763621486 was shipped",
    "192.168.1.1, 10.0.0.7, 2001:db8::1, fe80::1",
    "http://user:password@host.com/",
    'password: str, "password": "string", password = getpass.getpass()',
    "export DB_PASSWORD=${DB_PASSWORD}",
    "Your password is too short: use 8 characters.",
    "Das Passwort: ungültig.",
    "login(user=name, password=secret_value)",
    "look at example dot com",
    "Via Appia 312 a.C., Avenida Paulista 1998",
    "shipped on 2019-02-15, pages 11772-11781, lat 37.7749, 48.121314-0400",
    "259 3001 1027 287 4165 281 99165",
    "uuid 550e8400-e29b-41d4-a716-446655440000",
]


@pytest.mark.parametrize(("type", "text", "value"), FOUND, ids=[f"{i}-{case[0]}" for i, case in enumerate(FOUND)])
def test_private_values_have_their_type(type: str, text: str, value: str, scanner: Scanner):
    assert (type, value) in [(one.type, text[one.start : one.end]) for one in scanner.find(text)]


@pytest.mark.parametrize("text", NOT_FOUND)
def test_look_alikes_are_not_found(text: str, scanner: Scanner):
    assert [(one.type, text[one.start : one.end]) for one in scanner.find(text)] == []


def test_credentials_are_not_an_address(scanner: Scanner):
    assert redact(["use postgres://user:pw@db.firma.com/app"], scanner)[0] == [
        "use postgres://<URL_CREDENTIALS_1>@db.firma.com/app"
    ]


def test_each_line_of_the_table_names_a_check_and_a_type_of_its_own():
    checks = load_checks()
    assert all(number.module in checks for number in IDENTITY_NUMBERS if number.type != "UK_NINO")
    assert len({number.type for number in IDENTITY_NUMBERS}) == len(IDENTITY_NUMBERS) > 30


def test_phone_regions_are_an_option():
    text = "ring (11) 98765-4321"
    assert [one.type for one in Scanner(phone_regions=("BR",)).find(text)] == ["PHONE"]
    assert Scanner(phone_regions=("FR",)).find(text) == []
    assert Scanner(phone_regions=("FR",)).find("+55 11 98765-4321")


@pytest.mark.parametrize(("regions", "named"), [("US,XX", "XX"), ("", "no region"), ("Brazil", "BRAZIL")])
def test_unknown_phone_regions_are_refused(regions: str, named: str, write_lines, tmp_path):
    file = write_lines({"messages": [{"role": "user", "content": "Hi"}]})
    wanted = f"--phone-regions names {named}, wanted codes of ISO 3166"
    with pytest.raises(DataError, match=wanted):
        prepare([file, "--out", str(tmp_path / "o"), "--phone-regions", regions, "--workers", "1"])
    arguments = [file, "--endpoint", "http://127.0.0.1:9", "--out", str(tmp_path / "r"), "--privacy-scan"]
    with pytest.raises(DataError, match=wanted):
        generate([*arguments, "--phone-regions", regions])


@pytest.mark.timeout(60)
def test_long_runs_of_digits_and_letters_take_no_quadratic_time(scanner: Scanner):
    for unit in ("7", "a", "a+", "12 345 6 ", "Aaa ", "password ", "a-b.c at ", "Rua Aaa de ", "0.123456, ", " "):
        scanner.find(unit * (60_000 // len(unit)))
