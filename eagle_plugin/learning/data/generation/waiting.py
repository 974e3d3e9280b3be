"""Waiting for a server that takes no more requests for now: a rate limit, or 503 with the time to wait."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

import httpx

LONGEST_PAUSE_S = 60.0  # also where the server asks for more
PATIENCE_S = 1800.0  # without an answer to any request


def asks_to_wait(response: httpx.Response) -> bool:
    """Whether the server is there and wants the request later."""
    return response.status_code == 429 or (response.status_code == 503 and "retry-after" in response.headers)


@dataclass
class Pause:
    """The pause of one server, which holds for all its requests."""

    until: float = 0.0  # as time.monotonic()
    since: float | None = None  # when the first request was refused after the last answer

    async def over(self) -> None:
        """Return when requests may be sent."""
        while (left := self.until - time.monotonic()) > 0:
            await asyncio.sleep(left)

    def lengthen(self, response: httpx.Response, least: float) -> bool:
        """Wait as long as the response says, or `least` seconds; False if it has lasted longer than `PATIENCE_S`."""
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        self.until = max(self.until, now + min(max(_retry_after(response), least), LONGEST_PAUSE_S))
        return now - self.since <= PATIENCE_S

    def end(self) -> None:
        """A request was answered."""
        self.since = None


def _retry_after(response: httpx.Response) -> float:
    """Seconds, which the header gives as a number or as a date; 0 if it says nothing that can be read."""
    text = response.headers.get("retry-after", "")
    if text.strip().isdecimal():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return 0.0
    date = date if date.tzinfo else date.replace(tzinfo=timezone.utc)
    return (date - datetime.now(timezone.utc)).total_seconds()
