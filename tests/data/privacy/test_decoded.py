"""Private data in the strings of JSON and code: found behind escapes, replaced in place, and JSON stays JSON."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from private_values import VALUES, sentence

from eagle_plugin.learning.data.privacy.decoded import DEEPEST, Decoded
from eagle_plugin.learning.data.privacy.keys import KEYS
from eagle_plugin.learning.data.privacy.redact import redact
from eagle_plugin.learning.data.privacy.scanner import Scanner

MAIL = "anna@firma.de"


def nested(text: str, times: int) -> str:
    for _ in range(times):
        text = json.dumps({"result": text})
    return text


def innermost(text: str, times: int) -> str:
    for _ in range(times):
        text = json.loads(text)["result"]
    return text


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("space", ["\n", "\t"])
def test_a_value_behind_an_escape_is_replaced_and_the_escape_stays(space: str, times: int, scanner: Scanner):
    text = f"first{space}{MAIL}{space}last, and {MAIL}"
    changed, _ = redact([nested(text, times), MAIL], scanner)
    assert innermost(changed[0], times) == f"first{space}<EMAIL_1>{space}last, and <EMAIL_1>"
    assert changed[1] == "<EMAIL_1>"


@pytest.mark.parametrize("escape", ["\\n", "\\t"])
@pytest.mark.parametrize(("type", "before", "value"), VALUES, ids=[f"{i}-{one[0]}" for i, one in enumerate(VALUES)])
def test_each_detector_works_by_itself_behind_an_escape(
    type: str, before: str, value: str, escape: str, scanner: Scanner
):
    """What another detector finds there does not count; the value itself begins behind the escape if it can."""
    inner = json.dumps(sentence("", value) if type.endswith(("KEY", "TOKEN", "JWT")) else sentence(before, value))
    decoded = Decoded('{"log": "done' + escape + inner[len('"Hello, ') :] + "}")
    found = [one for one in scanner._find_in(decoded.text) if one.type == type]
    if not found:  # of the keys, AccountKey= belongs to the value
        decoded = Decoded('{"log": "done' + escape + json.dumps(sentence(before, value))[1:] + "}")
        found = [one for one in scanner._find_in(decoded.text) if one.type == type]
        assert type == "AZURE_KEY"
    assert any(value in decoded.text[one.start : one.end] for one in found)


def test_a_password_ends_where_its_line_ends(scanner: Scanner):
    text = json.dumps({"stdout": "DB_PASSWORD=plumriver42\nPORT=1"})
    changed, _ = redact([text, "please try it again: plumriver42"], scanner)
    assert json.loads(changed[0]) == {"stdout": "DB_PASSWORD=<SECRET_1>\nPORT=1"}
    assert changed[1] == "please try it again: <SECRET_1>"


def test_a_known_value_beside_another_one_is_replaced(scanner: Scanner):
    texts = ["phone 2127365081plumriver42", "password: plumriver42", "plumriver42plumriver42x"]
    assert redact(texts, scanner)[0] == ["phone <PHONE_1><SECRET_1>", "password: <SECRET_1>", texts[2]]


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_quoted_password_with_a_quote_in_it_is_found_whole(times: int, scanner: Scanner):
    text = nested(json.dumps({"password": 'say"cheese"twice5', "port": 1}), times)
    (changed,), _ = redact([text], scanner)
    assert json.loads(innermost(changed, times)) == {"password": "<SECRET_1>", "port": 1}


def test_an_authorization_header_in_json_is_found(scanner: Scanner):
    token = "q7Zr" + "M2xPw9LkT4vB8nYc"
    for text in ({"h": f"GET /\nAuthorization: Bearer {token}\n"}, {"Authorization": f"Bearer {token}"}):
        (changed,), _ = redact([nested(json.dumps(text), 1)], scanner)
        assert token not in changed
        assert json.loads(innermost(changed, 1)).keys() == text.keys()
    assert scanner.find(json.dumps({"Authorization": "Bearer YOUR_TOKEN", "Accept": "Bearer accessToken"})) == []


def test_all_but_the_values_stays_byte_for_byte(scanner: Scanner):
    """The order of keys, numbers that Python writes differently, escapes of other writers, and spaces."""
    text = '{"z": 1.50, "a" :1E5,\r\n "u": "caf\\u00e9 \\/ \\ud83d\\ude00 %s", "n": 12345678901234567890, "m": "%s"}'
    (changed,), _ = redact([text % (MAIL, MAIL)], scanner)
    assert changed == text % ("<EMAIL_1>", "<EMAIL_1>")


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_number_becomes_a_string(times: int, scanner: Scanner):
    inner = {"card": 4111111111111111, "all": [7, 4111111111111111], "text": "4111111111111111"}
    (changed,), counts = redact([nested(json.dumps(inner), times)], scanner)
    name = "<CREDIT_CARD_1>"
    assert json.loads(innermost(changed, times)) == {"card": name, "all": [7, name], "text": name}
    assert counts == {"CREDIT_CARD": 3}


def test_a_backslash_that_is_no_escape_hides_nothing(scanner: Scanner):
    assert redact([rf"C:\new\{MAIL}"], scanner)[0] == [r"C:\new\<EMAIL_1>"]
    assert redact([r"password: tr\n4quil-ox9"], scanner)[0] == ["password: <SECRET_1>"]


def test_a_street_takes_its_postal_code_along(scanner: Scanner):
    texts = ["Via Roma 7, 20121 Milano", "Calle Mayor 5, 28013 Madrid", "Rua Augusta 10, 1100-053 Lisboa"]
    assert redact(texts, scanner)[0] == [f"<STREET_ADDRESS_{i}>" for i in (1, 2, 3)]


JSON = st.recursive(
    st.sampled_from(["", "x\ny", 'a"b', "\\n", MAIL, f"to\n{MAIL}", "password: tr4nquil-ox", "é\ud800", "C:\\new"])
    | st.sampled_from([0, -1.5, 4111111111111111, None, True]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "password", "m\tn", MAIL]), inner, max_size=3)
        | inner.map(json.dumps)
        | inner.map(lambda one: json.dumps(one, ensure_ascii=False, indent=1))
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.lists(JSON, min_size=1, max_size=3))
def test_redacted_json_parses_and_has_its_shape(value: list[object], scanner: Scanner):
    (changed,), _ = redact([json.dumps(value)], scanner)
    assert MAIL not in changed
    assert shape(json.loads(changed)) == shape(value)


def shape(value: object) -> object:
    if isinstance(value, dict):
        return [shape(one) for one in value.values()]
    if isinstance(value, list):
        return [shape(one) for one in value]
    return "text or card" if isinstance(value, str) or value == 4111111111111111 else value


def test_the_places_of_a_decoded_text_are_those_of_the_given_one():
    given = '{"a": "x\\u00e9\\n\\ud83d\\ude00y", "b": "{\\"c\\": \\"\\\\n\\"}"} \'\\t\''
    decoded = Decoded(given)
    assert decoded.text == '{"a": "xé\n😀y", "b": "{"c": "\n"}"} \'\n\''
    assert [given[a:b] for a, b in pairwise(decoded.places)][7:12] == [*("x", "\\u00e9", "\\n", "\\ud83d\\ude00", "y")]
    assert decoded.places[-1] == len(given) and not decoded.exact
    assert Decoded(given, code=False).exact


# (text, findings): with work that grows with the square of the length, each of them takes minutes to hours.
LONG = {
    "nested": (nested(MAIL, DEEPEST + 4), 1),
    "escapes": (nested(json.dumps(["line\n\t" * 9] * 4000), 1), 0),
    "backslashes": ("\\" * 10**6, 0),
    "escaped quotes": ('\\"a' * 100_000, 0),
    "quotes": ('"' * 10**6, 0),
    "no escapes of JSON": ('"abc\\d ' * 50_000, 0),
    "brackets": ("[" * 500_000, 0),
    "labels": ("password:" * 20_000, 0),
    "quoted": ('password="a\\"' * 20_000, 0),
    "key files": (("PuTTY-User-" + "Key-File-3: x\n") * 20_000, 1),
    "values": ("".join(f'password="pw{i}xK{i * 7}"\n' for i in range(10_000)), 10_000),
}


@pytest.mark.parametrize("name", LONG)
def test_the_work_for_a_long_text_does_not_grow_with_its_square(name: str, scanner: Scanner):
    text, findings = LONG[name]
    (changed,), counts = redact([text], scanner)
    assert counts.total() == findings
    assert bool(findings) or changed == text


@pytest.mark.parametrize(
    ("type", "text", "value"),
    [
        ("CREDIT_CARD", "my card 4111\u00a01111\u00a01111\u00a01111, thanks", "4111 1111 1111 1111"),
        ("CREDIT_CARD", "my card ４１１１ １１１１ １１１１ １１１１", "4111 1111 1111 1111"),
        ("CREDIT_CARD", "my card ٤١١١١١١١١١١١١١١١", "4111111111111111"),
        ("CREDIT_CARD", "my card 4111&#32;1111&#x20;1111 1111", "4111 1111 1111 1111"),
        ("IBAN", "IBAN DE89\u202f3704\u202f0044\u202f0532\u202f0130\u202f00", "DE89 3704 0044 0532 0130 00"),
        ("EMAIL", "write to anna.\u00adberg\u200b@firma.de", "anna.berg@firma.de"),
        ("EMAIL", "write to anna.berg&#64;firma.de", "anna.berg@firma.de"),
        ("EMAIL", "write to ａｎｎａ＠ｆｉｒｍａ．ｄｅ", "anna@firma.de"),
        ("PHONE", "call +1\u00a0415\u2060-732-6094", "+1 415-732-6094"),
    ],
)
@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_value_in_other_characters_is_found_and_replaced_whole(
    type: str, text: str, value: str, times: int, scanner: Scanner
):
    given = nested(text, times)
    (changed, plain), found = redact([given, f"again {value}, thanks"], scanner)
    assert set(found) == {type} and plain == f"again <{type}_1>, thanks"
    before, after = text.split(" ")[0], text.rpartition(",")[2] if "," in text else ""
    assert innermost(changed, times).startswith(before) and innermost(changed, times).endswith(
        f"<{type}_1>{after and ',' + after}"
    )


@pytest.mark.parametrize(
    "text", ["10² and x³ are 4½", "密码：未设置，谢谢", "a：b", "naïve café &#0; &#xD800; &amp; &#9999999;", "①②"]
)
def test_other_characters_stay_as_they_are(text: str, scanner: Scanner):
    decoded = Decoded(text)
    assert [text[start:end] for start, end in pairwise(decoded.places)] == list(decoded.text) or "&#" in text
    assert redact([text], scanner)[0] == [text]
    assert not {"102", "x3", "12"} & set(decoded.text.split())


def test_a_token_does_not_begin_within_the_characters_of_one():
    """Else each of many beginnings reads on to the end: "-eyJaaaaaaaa" took the square of its repetitions."""
    jwt = next(one for one in KEYS if one.type == "JWT")
    token = "eyJ" + "hbGciOiJIUzI1NiJ9." + "eyJ" + "zdWIiOiJ4In0." + "c2lnbmF0dXJlLW9mLXg"
    for before in ("", "Bearer ", "令牌", '"', "="):
        assert jwt.regex.search(before + token)
    for before in ("-", "a-"):
        assert not jwt.regex.search(before + token)
