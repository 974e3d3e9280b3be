"""How an error names a failed HTTP request: by status and text of the server, or by what the connection did."""

from __future__ import annotations

import os

import httpx

from eagle_plugin.common.url_credentials import without_credentials

NO_SCHEME = "begin the address with http://"
PROXIES = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_CHARACTERS = 200  # of the text of the server


def describe_failure(failure: httpx.Response | Exception) -> str:
    """One line; of an error status the text of the server, without the link to a page about it that httpx adds."""
    if isinstance(failure, httpx.HTTPStatusError):
        failure = failure.response
    if isinstance(failure, httpx.Response):
        text = " ".join(failure.text.split())[:MOST_CHARACTERS]
        return f"HTTP {failure.status_code}: {text}" if text else f"HTTP {failure.status_code}"
    if isinstance(failure, httpx.UnsupportedProtocol):
        return f"{NO_SCHEME}, or with https://"
    if isinstance(failure, httpx.ConnectTimeout):
        return f"no connection within the time limit{_unused_proxy(failure)}"
    if isinstance(failure, httpx.TimeoutException):
        return "the connection was accepted, and no answer came within the time limit"
    text = without_credentials(f"{type(failure).__name__} {failure}".strip())
    return f"{text}{_unused_proxy(failure)}" if isinstance(failure, httpx.ConnectError) else text


def _unused_proxy(failure: httpx.RequestError) -> str:
    """That requests go to the server itself, where a user may expect a proxy on the way."""
    try:
        is_far = failure.request.url.host not in LOOPBACK
    except RuntimeError:  # of a failure without a request
        is_far = False
    named = next((name for name in PROXIES if os.environ.get(name) or os.environ.get(name.lower())), "")
    return f"; {named} is set, and no proxy is used for requests to servers" if named and is_far else ""
