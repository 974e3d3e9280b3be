"""What requests to a user's server carry and trust: the API key, and the certificates of its TLS."""

from __future__ import annotations

import os
import ssl
from typing import Any

import httpx

from eagle_plugin.common.errors import UserError
from eagle_plugin.common.http_failures import describe_failure
from eagle_plugin.common.url_credentials import HIDDEN

API_KEYS = ("EAGLE_API_KEY", "OPENAI_API_KEY")  # the first that is set
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")  # of authorities, in place of those of certifi
_UNAUTHORISED = (401, 403)


def api_key() -> str | None:
    """The user's key; None if there is none.

    Raises:
        UserError: it has a character that no HTTP header has.
    """
    name = _variable()
    if name is None:
        return None
    key = os.environ[name].strip()
    if not all("!" <= character <= "~" for character in key):  # the errors of httpx would show it
        raise UserError(f"{name} has a space or a character outside of ASCII, wanted a key; copy it again")
    return key


def key_headers() -> dict[str, str]:
    """The header with the user's key; empty without a key."""
    key = api_key()
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def tls_context() -> ssl.SSLContext:
    """The authorities that are trusted: those of SSL_CERT_FILE or SSL_CERT_DIR, or else those of certifi.

    Raises:
        UserError: that file cannot be read.
    """
    try:
        return httpx.create_ssl_context()
    except OSError as error:  # SSLError among them
        named = " or ".join(f"{name}={os.environ[name]}" for name in CERTIFICATES if os.environ.get(name))
        raise UserError(f"the certificates of {named} cannot be read ({error}); correct or unset it") from error


def request_options() -> dict[str, Any]:
    """Arguments of a single httpx request to a user's server; of the environment, proxies are not used."""
    return {"headers": key_headers(), "verify": tls_context(), "trust_env": False}


def describe_refusal(failure: httpx.Response | Exception) -> str:
    """`describe_failure` without the key; of a server that wants one, with the variable that holds it."""
    text = describe_failure(failure)
    name, key = _variable(), api_key()
    if key is not None:
        text = text.replace(key, HIDDEN)
    response = failure.response if isinstance(failure, httpx.HTTPStatusError) else failure
    if not isinstance(response, httpx.Response) or response.status_code not in _UNAUTHORISED:
        return text
    advice = f"set {API_KEYS[0]} to a key of this server" if name is None else f"it does not accept the key of {name}"
    return f"{text}, {advice}"


def _variable() -> str | None:
    return next((name for name in API_KEYS if os.environ.get(name, "").strip()), None)
