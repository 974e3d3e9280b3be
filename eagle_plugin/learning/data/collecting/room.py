"""How much servers hold for a client: the bytes of documents that were asked for and have not come into the store.

A server drops what its queue cannot take (`EAGLE_FEATURES_QUEUE_MIB`), and its prefill would be done twice. So a client
asks for no more than a share of the queue at a time: what a server says in its answers of how large it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from eagle_plugin.collect.recorder import FACTS_BYTES, TOKEN_BYTES
from eagle_plugin.learning.data.store.manifest import Manifest

PATIENCE_S = 15.0  # after an answer, without any document: what has not come by then was lost
SHARE = 0.5  # of a queue, for all processes of a client; the rest is for others who ask the same server


def sent_bytes(manifest: Manifest, tokens: int) -> int:
    """Bytes of a document in a server's queue: its states in bfloat16, and its ids as text."""
    tokens = min(tokens, manifest.max_length)
    return tokens * (manifest.states_bytes + TOKEN_BYTES) + FACTS_BYTES


@dataclass
class _Held:
    url: str
    size: int
    answered: float | None = None


class Room:
    """The documents that servers hold. Made for one thread."""

    def __init__(self, share: float = SHARE, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        self._held: dict[str, _Held] = {}
        self._newest = clock()

    def fits(self, url: str, queue_bytes: int, size: int) -> bool:
        """Whether a server with such a queue (0: it does not say) takes one more document; one alone always fits."""
        held = sum(one.size for one in self._held.values() if one.url == url)
        return not queue_bytes or not held or held + size <= self._share * queue_bytes

    def ask(self, name: str, url: str, size: int) -> None:
        """A document is asked for."""
        self._held[name] = _Held(url, size)

    def answered(self, name: str) -> None:
        """Its answer has come, and the document will."""
        if name in self._held:
            self._held[name].answered = self._clock()

    def came(self, names: Iterable[str]) -> None:
        """Documents are in the store; perhaps none."""
        if found := [*names]:
            self._newest = self._clock()
            self.forget(found)

    def forget(self, names: Iterable[str]) -> None:
        """Documents that will not come, or are no longer wanted."""
        for name in names:
            self._held.pop(name, None)

    def forget_server(self, url: str) -> None:
        """What a server held is lost: it has ended."""
        self.forget([name for name, one in self._held.items() if one.url == url and one.answered is not None])

    def forget_lost(self) -> None:
        """Forget documents that have not come although their answers did, and nothing else comes either."""
        now = self._clock()
        answered = {name: one.answered for name, one in self._held.items() if one.answered is not None}
        self.forget([name for name, when in answered.items() if now - max(when, self._newest) > PATIENCE_S])
