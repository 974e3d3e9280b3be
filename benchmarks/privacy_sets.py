"""The texts of the privacy benchmark, in benchmarks/privacy_texts. Every person, number and key in them is invented.

"§" in a text is replaced by its private value: a string, or a list of the name of a function of MAKERS and its
arguments, of which lists are made in the same way. Numbers have right check digits. Strings that look like keys are
joined at run time, so that secret scanners do not report the files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).with_name("privacy_texts")
ALPHABETS = {
    "letters and digits": string.ascii_letters + string.digits,
    "letters": string.ascii_letters,
    "digits": string.digits,
    "upper": string.ascii_uppercase + string.digits,
    "lower": string.ascii_lowercase + string.digits,
    "hex": "0123456789abcdef",
    "base64": string.ascii_letters + string.digits + "/+",
    "urlsafe": string.ascii_letters + string.digits + "-_",
}


class Labelled(NamedTuple):
    """A text and the private value that it contains."""

    type: str
    text: str
    value: str


def read_texts(name: str) -> dict[str, Any]:
    """Of `private`, the frames and values by type, or the sentences by subject and language; of `harmless`, texts."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def written_texts() -> tuple[list[Labelled], list[str]]:
    """The first set: texts written by hand, with a private value and without."""
    found = read_texts("written")
    return [Labelled(kind, frame.replace("§", value), value) for kind, frame, value in framed(found)], found["harmless"]


def framed(texts: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Type, frame and value of each private text of a file."""
    for kind, cases in texts["private"].items():
        yield from ((kind, frame, made(value)) for frame, value in cases)


def made(value: Any) -> Any:
    """The value that a file describes."""
    return MAKERS[value[0]](*map(made, value[1:])) if isinstance(value, list) else value


def noise(seed: str, length: int, alphabet: str = "letters and digits") -> str:
    """Characters that look random and are the same in every run."""
    stream = hashlib.shake_256(seed.encode()).digest(length)
    characters = ALPHABETS[alphabet]
    return "".join(characters[byte % len(characters)] for byte in stream)


def card(start: str, length: int, step: int = 0, between: str = " ") -> str:
    """A card number with a correct check digit (Luhn), in groups of `step` digits."""
    digits = start + noise(start, length - 1 - len(start), "digits")
    total = sum(sum(divmod(int(d) * (2 if i % 2 == 0 else 1), 10)) for i, d in enumerate(reversed(digits)))
    digits += str(-total % 10)
    return digits if not step else between.join(digits[i : i + step] for i in range(0, length, step))


def iban(country: str, account: str, spaced: bool = False) -> str:
    """An account number with correct check digits (mod 97)."""
    check = 98 - int("".join(str(int(c, 36)) for c in account + country + "00")) % 97
    iban = f"{country}{check:02d}{account}"
    return " ".join(iban[i : i + 4] for i in range(0, len(iban), 4)) if spaced else iban


def jwt(seed: str, claims: dict[str, str]) -> str:
    """A token with these claims and a signature of noise."""
    parts = [{"alg": "HS256", "typ": "JWT"}, claims]
    made = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*made, noise(seed, 43)])


def pem(kind: str, lines: int) -> str:
    """A key file with so many lines of noise."""
    bar = "-" * 5
    body = "\n".join(noise(f"{kind}{i}", 64) for i in range(lines))
    return f"{bar}BEGIN {kind}{bar}\n{body}\n{bar}END {kind}{bar}"


def my_number(digits: str) -> str:
    """An individual number of Japan: 11 digits and their check digit."""
    total = sum(int(d) * (n + 1 if n <= 6 else n - 5) for n, d in enumerate(reversed(digits), start=1))
    return digits + str(11 - total % 11 if total % 11 > 1 else 0)


def bitcoin(seed: str) -> str:
    """An address of Bitcoin in base 58, with its check digits (a hash of a hash)."""
    alphabet = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    body = b"\0" + hashlib.sha256(seed.encode()).digest()[:20]
    whole = int.from_bytes(body + hashlib.sha256(hashlib.sha256(body).digest()).digest()[:4], "big")
    digits = ""
    while whole:
        whole, rest = divmod(whole, 58)
        digits = alphabet[rest] + digits
    return "1" + digits


def putty_key(seed: str, version: int) -> str:
    """A key file of PuTTY with four lines of private data."""
    kind = "PuTTY-User-" + f"Key-File-{version}: ssh-ed25519"
    lines = "\n".join(noise(f"{seed}{i}", 64) for i in range(4))
    head = f"{kind}\nEncryption: none\nComment: laptop\nPublic-Lines: 1\n{noise(seed, 64)}\nPrivate-Lines: 4"
    return f"{head}\n{lines}\nPrivate-MAC: {noise(seed, 64, 'hex')}"


MAKERS: dict[str, Callable[..., str]] = {
    "join": lambda *parts: "".join(parts),
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "sha512": lambda text: base64.b64encode(hashlib.sha512(text.encode()).digest()).decode(),
    **{make.__name__: make for make in (noise, card, iban, jwt, pem, my_number, bitcoin, putty_key)},
}
