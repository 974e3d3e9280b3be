"""How many drafts the rounds of an answer accepted, from the engine's process of requests to the middleware.

An engine that tells it in no answer tells it here when a request is finished, which is before its answer ends.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence

MOST = 4096  # answers that wait; those that nobody takes, such as of routes that are not captured, make place
ID_WITHIN = 300  # bytes of an answer, or of the first event of its stream
META_WITHIN = 4096  # bytes at the end of one of SGLang's /generate, where the id is after the text
_ID = re.compile(rb'"id":\s*"([^"\\]+)"')


class AcceptedDrafts:
    """Counts of finished requests, by the id of their answer. For one thread: that of the server's event loop."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._waiting: OrderedDict[str, list[int]] = OrderedDict()

    def note(self, id: str, rounds: Sequence[int]) -> None:
        """Of a finished request: its rounds that accepted exactly 0, 1, 2, ... drafts."""
        self._waiting[id] = [int(count) for count in rounds]
        if len(self._waiting) > self._most:
            self._waiting.popitem(last=False)

    def take(self, answer: bytes) -> list[int] | None:
        """The counts of an answer, once; None if nothing was noted."""
        found = _ID.search(answer[:ID_WITHIN])
        if not found and (meta := answer.rfind(b'"meta_info"', max(0, len(answer) - META_WITHIN))) >= 0:
            found = _ID.search(answer, meta)
        return self._waiting.pop(found[1].decode("utf-8", "replace"), None) if found else None


ACCEPTED_DRAFTS = AcceptedDrafts()  # of this process; an engine's adapter notes, the middleware takes
