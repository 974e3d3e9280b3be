"""What is found and what is not, by type; placeholders; no value that was found is left in the text or logged."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_plugin.learning.data.privacy.patterns import Finding
from eagle_plugin.learning.data.privacy.redact import redact
from eagle_plugin.learning.data.privacy.scanner import Scanner, load_user_recogniser
from eagle_plugin.learning.data.rows import DataError

# Joined here from parts, so that secret scanners do not report this file.
GITHUB = "gh" + "p_" + "aB3dE6gH9" * 4
JWT = "eyJ" + "hbGciOiJIUzI1NiJ9." + "eyJ" + "zdWIiOiJ4In0." + "c2lnbmF0dXJlLW9mLXg"
PEM = "-----BEGIN " + "PRIVATE KEY-----\n" + "MIIEvQIBADANBgkqhkiG\n" * 3 + "-----END " + "PRIVATE KEY-----"

FOUND = [
    ("EMAIL", "write to anna.berg@firma.de now", "anna.berg@firma.de"),
    ("EMAIL", "root@db1.corp.internal", "root@db1.corp.internal"),
    ("PHONE", "call +1 415-732-6094 later", "+1 415-732-6094"),
    ("PHONE", "phone 2127365081", "2127365081"),
    ("CREDIT_CARD", "4111 1111 1111 1111", "4111 1111 1111 1111"),
    ("IBAN", "IBAN DE89370400440532013000", "DE89370400440532013000"),
    ("IP_ADDRESS", "from 203.0.113.77:22", "203.0.113.77"),
    ("IP_ADDRESS", "peer 2a01:4f8:c17::8a2e:370:7334", "2a01:4f8:c17::8a2e:370:7334"),
    ("US_SSN", "SSN 536-22-8714", "536-22-8714"),
    ("AWS_KEY", "id AKIA" + "IOSFODNN7EXAMPL2", "AKIA" + "IOSFODNN7EXAMPL2"),
    ("GITHUB_TOKEN", f"use {GITHUB}", GITHUB),
    ("JWT", f"Cookie: {JWT};", JWT),
    ("PRIVATE_KEY", f"my key\n{PEM}\nok?", PEM),
    ("PRIVATE_KEY", PEM[:70], PEM[:70].rstrip()),
    ("URL_CREDENTIALS", "postgres://ann:tr4nquil@db/app", "ann:tr4nquil"),
    ("SECRET", 'password = "vT9#kLq2!x"', "vT9#kLq2!x"),
    ("SECRET", "dbPassword: 'vT9#kLq2!x'", "vT9#kLq2!x"),
    (
        "STREET_ADDRESS",
        "at 742 Evergreen Terrace, Springfield, OR 97477",
        "742 Evergreen Terrace, Springfield, OR 97477",
    ),
    ("STREET_ADDRESS", "an Lindenstraße 14, 10969 Berlin", "Lindenstraße 14, 10969 Berlin"),
]
NOT_FOUND = [
    "4111 1111 1111 1112 fails the checksum of cards",
    "DE89370400440532013001 fails the checksum of accounts",
    "0.37365712993328054 and [3072 1515 996 663]",
    "pip install torch==2.13.0.1, version 10.15.7.1, v1.21.13.14",
    "127.0.0.1, 0.0.0.0, ::1 and 255.255.255.0",
    "a::b and std::vector<int>::iterator",
    "git clone git@github.com:x/y.git",
    "image@2x.png, @decorator, a @ b.T",
    "2026-11-21T12:37:59, 0830-0840, 1732192679",
    "password = os.environ['DB_PASSWORD']",
    "api_key = 'YOUR_API_KEY_123'",
    "http://user:password@host/",
    "tokenizer: llama-3.1-8b-instruct, max_tokens=16384",
    "987654321 divided by 123456789",
    "I walked 5 miles down the street",
]


@pytest.mark.parametrize(("type", "text", "value"), FOUND, ids=[f"{i}-{case[0]}" for i, case in enumerate(FOUND)])
def test_private_data_is_found_whole(type: str, text: str, value: str, scanner: Scanner):
    start = text.index(value)
    assert Finding(type, start, start + len(value)) in scanner.find(text)
    assert scanner.scan(text)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("space", ["\n", "\t", "\x1b"])
def test_a_value_after_an_escaped_character_is_found(space: str, times: int, scanner: Scanner):
    """As in the arguments of a tool call, which are JSON within JSON."""
    for _, text, value in FOUND:
        line = f"notes:{space}{text if text.startswith(value) else value}{space}end"
        if not scanner.scan(line):  # found with the words before it only
            line = f"notes:{space}{text}{space}end"
        for _ in range(times):
            line = json.dumps(line)
        assert scanner.scan(line), line
        ((changed,), _) = redact([line], scanner)
        assert json.dumps(value)[1:-1] not in changed, changed


@pytest.mark.parametrize("text", NOT_FOUND)
def test_what_only_looks_private_is_not_found(text: str, scanner: Scanner):
    assert scanner.find(text) == []


def test_a_value_far_inside_a_long_text_is_found(scanner: Scanner):
    """Recognisers see windows: the same values among 200 kB without line ends, and between lines."""
    for filler in ("lorem ipsum " * 9000, "lorem ipsum\n" * 9000):
        for type, text, value in FOUND:
            whole = f"{filler} {text} {filler}"
            start = whole.index(value)
            assert any(f.type == type and f.start <= start and f.end >= start + len(value) for f in scanner.find(whole))


def test_a_planted_key_in_a_generated_answer_is_found(scanner: Scanner):
    answer = "Sure! Here is how you log in:\n\n```bash\nexport TOKEN={}\n```\n"
    assert scanner.scan(answer.format(GITHUB))
    assert not scanner.scan(answer.format("$GITHUB_TOKEN"))


def test_placeholders_are_typed_and_stable_within_a_row(scanner: Scanner):
    texts = [
        "I am a@firma.de, she is b@firma.de",
        "Dear a@firma.de, call +1 415-732-6094",
        'pwd: "Gr4phite-Owl"',
        "Gr4phite-Owl?",
    ]
    changed, counts = redact(texts, scanner)
    assert changed == [
        "I am <EMAIL_1>, she is <EMAIL_2>",
        "Dear <EMAIL_1>, call <PHONE_1>",
        'pwd: "<SECRET_1>"',
        "<SECRET_1>?",
    ]
    assert counts == {"EMAIL": 3, "PHONE": 1, "SECRET": 1}


def test_a_value_whose_first_letter_is_part_of_an_escape(scanner: Scanner):
    texts = ['password = "nGr4phite-Owl"', "see \\nGr4phite-Owl", json.dumps({"a": "b\nGr4phite-Owl", "c": "d"})]
    changed, _ = redact(texts, scanner)
    assert changed[:2] == ['password = "<SECRET_1>"', "see <SECRET_1>"]
    assert json.loads(changed[2]) == {"a": "b<SECRET_1>", "c": "d"}


NOISE = st.text(alphabet="abn .,:;=/@-+\n\\\"'<>(){}019é\u2028", max_size=12)
PLANTED = st.sampled_from([value for *_, value in FOUND] + [text for _, text, _ in FOUND])


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.lists(st.tuples(NOISE, PLANTED, NOISE), max_size=3), min_size=1, max_size=3))
def test_redaction_never_leaves_what_was_flagged(rows: list[list[tuple[str, str, str]]], scanner: Scanner):
    texts = ["".join(map("".join, row)) for row in rows]
    values = {text[f.start : f.end] for text in texts for f in scanner.find(text)}
    changed, counts = redact(texts, scanner)
    assert bool(counts) == bool(values) == (changed != texts)
    for text in changed:
        bare = re.sub(r"<[A-Z_]+_\d+>", "\x00", text)
        assert not [value for value in values if re.search(rf"(?<!\w){re.escape(value)}(?!\w)", bare)]


def find_names(text: str) -> list[tuple[str, int, int]]:
    """A recogniser of a user; the tests load it by its path."""
    return [("person name", match.start(), match.end()) for match in re.finditer(r"Ingrid \w+", text)] + [("BAD", 5, 2)]


def test_a_users_recogniser_finds_names(scanner: Scanner, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "my_names", sys.modules[__name__])
    text = "Ingrid Vasquez called."
    assert scanner.find(text) == []
    assert redact([text], Scanner("my_names:find_names"))[0] == ["<PERSON_NAME_1> called."]


@pytest.mark.parametrize("path", ["nowhere.at_all:find", "re:nothing", "re", "", ":"])
def test_a_bad_path_is_refused_at_the_start(path: str):
    with pytest.raises(DataError, match=re.escape(f"--recogniser {path} cannot be loaded")):
        load_user_recogniser(path)
    with pytest.raises(DataError, match="is a str, wanted a function"):
        load_user_recogniser("re:__doc__")


def test_nothing_is_logged_and_no_network_is_asked(
    scanner: Scanner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*arguments: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with caplog.at_level(logging.DEBUG):
        for _, text, _ in FOUND:
            scanner.find(text + " DE00ABCDABCDABCDABCDAB x@y.neverheard")
    assert not caplog.records


def test_without_the_packages_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['presidio_analyzer'] = None\n"
        "from eagle_plugin.learning.data.privacy.scanner import Scanner\n"
        "try: Scanner()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("DataError the privacy filter needs the Python package presidio_analyzer")
    assert "pip install '.[privacy]' in the folder of eagle-plugin" in printed
