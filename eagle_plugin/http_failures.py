"""What a failed HTTP request is called in an error: the status and the server's words, or what the connection did."""

from __future__ import annotations

import httpx

MOST_CHARACTERS = 200  # of the server's words


def describe_failure(failure: httpx.Response | Exception) -> str:
    """One line; of an error status what the server said, without the link to a page about it that httpx adds."""
    if isinstance(failure, httpx.HTTPStatusError):
        failure = failure.response
    if isinstance(failure, httpx.Response):
        words = " ".join(failure.text.split())[:MOST_CHARACTERS]
        return f"HTTP {failure.status_code}: {words}" if words else f"HTTP {failure.status_code}"
    if isinstance(failure, httpx.ConnectTimeout):
        return "no connection within the time limit"
    if isinstance(failure, httpx.TimeoutException):
        return "the connection was accepted, and no answer came within the time limit"
    return f"{type(failure).__name__} {failure}".strip()
