"""The generated privacy benchmark: values in the formats of Faker's locales, in sentences of eight languages.

Two splits, with other seeds and other sentences: rules are developed on `development`, and the documents report
`reported`. The sentences were written before the patterns that they measure were changed; of each list, the first half
is for development. "ID" is replaced by the name of a number, such as CPF, and "{}" by a value.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import phonenumbers
from faker import Faker
from privacy_sets import Labelled, read_texts
from stdnum import verhoeff
from stdnum.de import idnr
from stdnum.fr import nir
from stdnum.in_ import aadhaar
from stdnum.iso7064 import mod_11_10

SEEDS = {"development": 1, "reported": 2}
LOCALES = {
    "en": "en_US en_GB en_IN",
    "pt": "pt_BR",
    "es": "es_ES",
    "fr": "fr_FR",
    "de": "de_DE",
    "it": "it_IT",
    "pl": "pl_PL",
    "ja": "ja_JP",
}
VALUES = 6  # per sentence
HARMLESS_VALUES = 10  # per sentence
SENTENCES = read_texts("generated")
FRAMES = SENTENCES["private"]


@dataclass(frozen=True)
class GeneratedText:
    """A text of a language that contains a private value, or none."""

    language: str
    case: Labelled


def private_texts(split: str) -> list[GeneratedText]:
    """The texts with a private value."""
    return list(_private_texts(split, random.Random(SEEDS[split])))


def harmless_texts(split: str) -> list[tuple[str, str]]:
    """The texts without one, as (language, text)."""
    rng = random.Random(SEEDS[split])
    texts = []
    for language, sentences in SENTENCES["harmless"].items():
        fake = _faker(LOCALES.get(language, "en_US").split()[0], rng)
        for sentence in _half(sentences, split):
            texts += [(language, sentence.format_map(_Values(fake, language, rng))) for _ in range(HARMLESS_VALUES)]
    return texts


def _private_texts(split: str, rng: random.Random) -> Iterator[GeneratedText]:
    for language, locales in LOCALES.items():
        for locale in locales.split():
            fake = _faker(locale, rng)

            def planted(
                type: str, subject: dict[str, list[str]], make: Callable[[], str], language: str = language
            ) -> Iterator[GeneratedText]:
                for sentence in _half(subject.get(language, []), split):
                    for _ in range(VALUES):
                        value = make()
                        yield GeneratedText(language, Labelled(type, _fill(sentence, value), value))

            for names, make in _identity_numbers(fake, locale, rng):
                for name in names:
                    named = {language: [text.replace("ID", name) for text in FRAMES["identity"][language]]}
                    yield from planted("identity number", named, make)
                yield from planted("identity number, not named", FRAMES["unnamed"], make)
            yield from planted("PHONE", FRAMES["phone"], lambda f=fake, at=locale[-2:]: _phone(f, at))
            if language != "ja":  # no pattern is meant for streets of Japan
                yield from planted("STREET_ADDRESS", FRAMES["address"], lambda f=fake: _street(f))
            yield from planted("SECRET, quoted", FRAMES["quoted_password"], lambda f=fake: _password(f, rng, True))
            yield from planted("SECRET, plain", FRAMES["plain_password"], lambda f=fake: _password(f, rng, False))
            yield from planted("EMAIL", FRAMES["mail"], lambda f=fake: rng.choice([f.free_email, f.company_email])())
            yield from planted("EMAIL, non-ASCII", FRAMES["mail"], lambda f=fake, at=locale[-2:]: _mail(f, at))
            for pair in _half(FRAMES["at_and_dot"].get(language, []), split):
                yield from planted("EMAIL, spelled", FRAMES["mail"], lambda f=fake, p=pair: _spelled(f, *p))
            if language not in ("ja", "pl"):
                yield from _codes(language, split, fake, rng)


def _codes(language: str, split: str, fake: Faker, rng: random.Random) -> Iterator[GeneratedText]:
    numbers = _faker("en_US", rng)
    makers: dict[str, Callable[[], str]] = {
        "CREDIT_CARD": lambda: numbers.credit_card_number(rng.choice(["visa16", "mastercard", "amex", "discover"])),
        # Where a locale has no form of its own, Faker makes British IBANs of a wrong length.
        "IBAN": (_faker("en_GB", rng) if language == "en" else fake).iban,
        "IP_ADDRESS": lambda: rng.choice([numbers.ipv4_public, numbers.ipv6])(),
        "US_SSN": numbers.ssn,
        "URL_CREDENTIALS": lambda: f"{fake.user_name()}:{numbers.password(special_chars=False)}",
    }
    for type, sentences in FRAMES["codes"].items():
        for sentence in _half(sentences, split):
            value = makers[type]()
            yield GeneratedText(language, Labelled(type, _fill(sentence.replace("{h}", fake.hostname()), value), value))


def _identity_numbers(fake: Faker, locale: str, rng: random.Random) -> list[tuple[list[str], Callable[[], str]]]:
    """What the numbers of a country are called, and their generator: with separators or without, at random."""

    def either(make: Callable[[], str], printed: Callable[[str], str] | None = None) -> Callable[[], str]:
        def one() -> str:
            value = make()
            bare = "".join(c for c in value if c.isalnum())
            return rng.choice([printed(bare) if printed else value, bare])

        return one

    made: dict[str, list[tuple[list[str], Callable[[], str]]]] = {
        "en_GB": [(["NINO", "National Insurance number"], either(lambda: _nino(rng)))],
        "en_IN": [(["Aadhaar", "UID"], either(lambda: _aadhaar(rng), aadhaar.format))],
        "pt_BR": [(["CPF"], either(lambda: fake.cpf())), (["CNPJ"], either(lambda: fake.cnpj()))],
        "es_ES": [(["NIF", "DNI"], either(lambda: fake.nif())), (["NIE"], either(lambda: fake.nie()))],
        "fr_FR": [(["NIR", "numéro de sécurité sociale"], either(fake.ssn, nir.format))],
        "de_DE": [(["Steuer-ID", "Steueridentifikationsnummer"], either(lambda: _steuer_id(rng), idnr.format))],
        "it_IT": [(["codice fiscale", "CF"], fake.ssn)],
        "pl_PL": [(["PESEL"], lambda: fake.pesel())],
    }
    return made.get(locale, [])


def _steuer_id(rng: random.Random) -> str:
    """Ten digits of which one is twice there and one is not, and a check digit; the first is not 0."""
    digits = rng.sample("0123456789", 9)
    digits.insert(rng.randrange(1, 9), digits[rng.randrange(9)])
    if digits[0] == "0":
        digits.reverse()
    if digits[0] == "0":
        return _steuer_id(rng)
    number = "".join(digits)
    return number + mod_11_10.calc_check_digit(number)


def _nino(rng: random.Random) -> str:
    """A National Insurance number. Those of Faker begin with ZZ, which is never given to a person."""
    digits = " ".join(f"{rng.randrange(100):02d}" for _ in range(3))
    return f"{rng.choice('ABCEGHJKLMNPRSTWXYZ')}{rng.choice('ABCEHJLMPRSWXY')} {digits} {rng.choice('ABCD')}"


def _aadhaar(rng: random.Random) -> str:
    """A number of Aadhaar. Most of Faker's have a wrong check digit."""
    number = f"{rng.randrange(2, 10)}{rng.randrange(10**10):010d}"
    return number + verhoeff.calc_check_digit(number)


def _phone(fake: Faker, region: str) -> str:
    """A number that can exist: Faker also makes numbers of area codes that nobody has."""
    while True:
        value = fake.phone_number()
        try:
            if "x" not in value and phonenumbers.is_valid_number(phonenumbers.parse(value, region)):
                return value
        except phonenumbers.NumberParseException:
            pass


def _street(fake: Faker) -> str:
    """A street with a house number: some of Faker's have none, and then they are the address of nobody."""
    while True:
        value = fake.street_address().strip()
        if any(c.isdigit() for c in value):
            return value


def _password(fake: Faker, rng: random.Random, quoted: bool) -> str:
    word = fake.user_name().replace(".", "")
    made = [
        lambda: fake.password(12),
        lambda: fake.password(10, special_chars=False),
        lambda: f"{word}{rng.randrange(10, 999)}",
        lambda: f"{word.capitalize()}{rng.randrange(1970, 2030)}!",
    ]
    if quoted:
        made.append(lambda: " ".join(fake.words(4)))
    return rng.choice(made)()


def _mail(fake: Faker, region: str) -> str:
    """An address whose domain is a name with letters outside of ASCII, if the locale has such names."""
    for _ in range(500):
        name = fake.last_name().lower()
        if not name.isascii() and name.isalpha():
            break
    else:
        name = "zoë-café"
    top = {"US": "com", "GB": "co.uk"}.get(region, region.lower())
    return f"{fake.user_name()}@{name}.{top}"


def _spelled(fake: Faker, at: str, dot: str) -> str:
    local, _, domain = fake.free_email().partition("@")
    return local + at + domain.replace(".", dot)


class _Values(dict[str, str]):
    """What the names in the harmless sentences are replaced by; each use of a name is a new value."""

    def __init__(self, fake: Faker, language: str, rng: random.Random) -> None:
        self._fake, self._language, self._rng = fake, language, rng

    def __missing__(self, name: str) -> str:
        fake, rng = self._fake, self._rng
        if hasattr(fake, name):
            return str(getattr(fake, name)())
        return {
            "order": lambda: rng.choice([fake.credit_card_number("visa16"), fake.numerify("#" * rng.randrange(8, 17))]),
            "people": lambda: f"{rng.randrange(10**5, 10**9):,}".replace(",", self._thousands()),
            "handle": lambda: f"@{fake.user_name()}@{rng.choice(['mastodon.social', 'fosstodon.org', 'chaos.social'])}",
            "private_ip": lambda: fake.ipv4_private(),
            "doc_ip": lambda: f"2001:db8::{rng.randrange(1, 0xFFFF):x}",
            "domain": lambda: fake.domain_name(),
            "tracking": lambda: fake.bothify("??#########").upper(),
            "small": lambda: str(rng.randrange(2, 30)),
            "price": lambda: fake.pricetag(),
            "version": lambda: ".".join(str(rng.randrange(30)) for _ in range(rng.randrange(2, 5))),
            "coordinates": lambda: ", ".join(map(str, fake.latlng())),
            "float": lambda: f"{rng.uniform(0, 5000):.{rng.randrange(1, 12)}f}",
            "number": lambda: str(rng.randrange(10 ** rng.randrange(1, 12))),
            "iso": lambda: fake.iso8601(),
            "path": lambda: fake.uri_path(),
            "file": lambda: fake.file_path(depth=3),
            "port": lambda: str(fake.port_number()),
            "status": lambda: str(fake.http_status_code()),
            "unix": lambda: str(int(fake.unix_time())),
            "uuid": fake.uuid4,
        }[name]()

    def _thousands(self) -> str:
        return {"en": ",", "ja": ",", "fr": "\u202f", "pl": " "}.get(self._language, ".")


def _fill(sentence: str, value: str) -> str:
    return sentence.replace("{{", "{").replace("}}", "}").replace("{}", value, 1)


def _half(sentences: list, split: str) -> list:
    middle = (len(sentences) + 1) // 2
    return sentences[:middle] if split == "development" else sentences[middle:]


def _faker(locale: str, rng: random.Random) -> Faker:
    fake = Faker(locale)
    fake.seed_instance(rng.randrange(2**32))
    return fake
