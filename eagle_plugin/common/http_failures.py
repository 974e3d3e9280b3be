"""How an error names a failed HTTP request: by status and text of the server, or by what the connection did."""

from __future__ import annotations

import httpx

from eagle_plugin.common.url_credentials import without_credentials

MOST_CHARACTERS = 200  # of the text of the server


def describe_failure(failure: httpx.Response | Exception) -> str:
    """One line; of an error status the text of the server, without the link to a page about it that httpx adds."""
    if isinstance(failure, httpx.HTTPStatusError):
        failure = failure.response
    if isinstance(failure, httpx.Response):
        text = " ".join(failure.text.split())[:MOST_CHARACTERS]
        return f"HTTP {failure.status_code}: {text}" if text else f"HTTP {failure.status_code}"
    if isinstance(failure, httpx.ConnectTimeout):
        return "no connection within the time limit"
    if isinstance(failure, httpx.TimeoutException):
        return "the connection was accepted, and no answer came within the time limit"
    return without_credentials(f"{type(failure).__name__} {failure}".strip())
