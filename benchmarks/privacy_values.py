"""Invented values of the privacy benchmark: numbers with right check digits, and strings that look like keys.

Strings that look like keys are made from parts at run time, so that secret scanners do not report these files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import string

UPPER = string.ascii_uppercase + string.digits
HEX = "0123456789abcdef"
URLSAFE = string.ascii_letters + string.digits + "-_"


def noise(seed: str, length: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    """Characters that look random and are the same in every run."""
    stream = hashlib.shake_256(seed.encode()).digest(length)
    return "".join(alphabet[byte % len(alphabet)] for byte in stream)


def card(start: str, length: int, step: int = 0) -> str:
    """A card number with a correct check digit (Luhn), in groups of `step` digits."""
    digits = start + noise(start, length - 1 - len(start), string.digits)
    total = sum(sum(divmod(int(d) * (2 if i % 2 == 0 else 1), 10)) for i, d in enumerate(reversed(digits)))
    digits += str(-total % 10)
    return digits if not step else " ".join(digits[i : i + step] for i in range(0, length, step))


def iban(country: str, account: str, spaced: bool = False) -> str:
    """An account number with correct check digits (mod 97)."""
    check = 98 - int("".join(str(int(c, 36)) for c in account + country + "00")) % 97
    iban = f"{country}{check:02d}{account}"
    return " ".join(iban[i : i + 4] for i in range(0, len(iban), 4)) if spaced else iban


def jwt(seed: str, **claims: str) -> str:
    parts = [{"alg": "HS256", "typ": "JWT"}, claims]
    made = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*made, noise(seed, 43)])


def pem(kind: str, lines: int) -> str:
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
    return f"{head}\n{lines}\nPrivate-MAC: {noise(seed, 64, HEX)}"
