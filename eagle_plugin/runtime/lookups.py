"""Looks branches up in the text of each request, in a buffer on the device that has a row for each (`core.lookup`).

Nothing here waits for the device, and what a round calls is a function of the buffer: a captured round may call it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle_plugin.common.errors import UserError
from eagle_plugin.core.lookup import CELLS, LENGTHS
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.lookup import TokenHistory, append_tokens
from eagle_plugin.runtime.host_to_device import to_device
from eagle_plugin.runtime.request_sources import ALL, Sources

SWITCH = "EAGLE_LOOKUP"
MODES = ("off", "on")
WINDOW = 16384  # tokens of a request that are looked at: 64 KiB per request
# Assumed. By what the head says of a token (not read, its best, listed, not listed), then by the length of the match.
PRIOR = (
    *(0.5, 0.4, 0.3, 0.2),
    *(0.6, 0.5, 0.4, 0.3),
    *(0.9, 0.8, 0.6, 0.4),
    *(0.97, 0.95, 0.9, 0.8),
)
assert len(PRIOR) == CELLS == 4 * len(LENGTHS)


class LookupModeError(UserError):
    """``EAGLE_LOOKUP`` has a value that is not known; the message says which are."""


def wants_lookups() -> bool:
    """Whether branches are looked up, by ``EAGLE_LOOKUP``. Raises LookupModeError."""
    mode = os.environ.get(SWITCH, "") or MODES[0]
    if mode not in MODES:
        raise LookupModeError(f"{SWITCH} is {mode!r}, wanted one of {', '.join(MODES)}: set it to one, or unset it")
    return mode == "on"


class Lookup(NamedTuple):
    """What a draft of b requests looks branches up in."""

    history: TokenHistory
    rows: Tensor  # [b] int64: 0 where nothing is looked up
    alone: Tensor  # [b] bool: requests whose trees have no node of the head


class Lookups:
    """The sequences of a server's requests."""

    def __init__(self, rows: int, caps: Shape, context: int, vocabulary: int, device: torch.device | str) -> None:
        """rows: of requests, with row 0, which is nobody's; caps: of trees; context: the most tokens of a request;
        vocabulary: of the target.
        """
        self._vocabulary, self._device = vocabulary, torch.device(device)
        window = max(min(WINDOW, context), 2)
        self.history = TokenHistory.empty(rows, window, caps.steps, torch.tensor(PRIOR), device)
        self._looked_at = torch.arange(rows, device=device)  # by row: the same row, or 0
        self._alone = torch.zeros(rows, dtype=torch.bool, device=device)  # by row, as in `Lookup`
        self._counted = [0, 0]  # of the last copy to the host
        self._arrived: torch.cuda.Event | None = None  # recorded after each copy
        if self._device.type == "cuda" and torch.cuda.is_available():
            self._pinned = torch.zeros(2, dtype=torch.int64, pin_memory=True)
            self._arrived = torch.cuda.Event()

    @property
    def nbytes(self) -> int:
        """Of the device's memory."""
        return sum(values.nbytes for values in self.history)

    def of(self, rows: Tensor) -> Lookup:
        """For a draft of the requests in these rows [b] int64."""
        return Lookup(self.history, self._looked_at[rows], self._alone[rows])

    def begin(self, rows: Tensor, sequences: Sequence[Sequence[int]], sources: Sequence[Sources] | None = None) -> None:
        """New sequences in these rows [b] int64, of which the host has all tokens; what was there before is forgotten.

        A token that the target does not have, as of an image, matches nothing. sources: what the trees of these
        requests come from, if not all come from head and text.
        """
        history, window = self.history, self.history.tokens.shape[1]
        kept = [np.asarray(text[-window:], dtype=np.int64) for text in sequences]
        ends = np.array([len(text) for text in sequences], dtype=np.int64)
        begins = ends - np.array([len(text) for text in kept], dtype=np.int64)
        tokens = np.concatenate([*kept, ends[:0]])
        tokens[(tokens < 0) | (tokens >= self._vocabulary)] = -1
        places = [np.arange(begin, end) % window for begin, end in zip(begins, ends, strict=True)]
        requests = np.repeat(np.arange(len(kept)), ends - begins)
        asked = np.array(sources or [ALL] * len(kept), dtype=np.int64).reshape(-1, 2)
        planned = [begins, ends - 1, tokens, np.concatenate([*places, ends[:0]]), requests, asked]
        begin, end, values, place, request, wanted = to_device(planned, self._device)
        self._looked_at[rows], self._alone[rows] = rows * wanted[:, 1], wanted[:, 0] == 0
        history.tokens[rows[request], place] = values.int()
        history.begins[rows], history.ends[rows] = begin, end
        history.starts[rows], history.expected[rows], history.missed[rows] = -1, 0, 0

    def append(self, rows: Tensor, prefix_lens: Tensor, accepted: Accepted) -> None:
        """As `core.lookup.append_tokens`."""
        append_tokens(self.history, rows, prefix_lens, accepted)

    def append_first(self, rows: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        """The token [b] that a prefill of `lengths` tokens gave each request."""
        one = torch.ones_like(lengths, dtype=torch.int32)
        accepted = Accepted(torch.zeros_like(one)[:, None], one, tokens.long()[:, None].contiguous())
        append_tokens(self.history, rows, lengths - 1, accepted)

    def counts(self) -> tuple[int, int]:
        """Nodes that only looked-up paths brought into trees, and how many of them were accepted.

        On a GPU they are of some time ago: the host waits for no copy, it starts one and reads the one before.
        """
        if self._arrived is None:
            proposed, accepted = self.history.counts.sum(dim=0).tolist()
            return proposed, accepted
        if self._arrived.query():
            self._counted = self._pinned.tolist()
            self._pinned.copy_(self.history.counts.sum(dim=0), non_blocking=True)
            self._arrived.record()
        return self._counted[0], self._counted[1]

    def clear(self) -> None:
        """Forget all sequences and what was counted."""
        history = self.history
        history.begins.zero_()
        history.ends.fill_(-1)
        history.starts.fill_(-1)
        for values in (history.expected, history.missed, history.counts):
            values.zero_()


def lookups_of(
    rows: int,
    caps: Shape,
    context: int,
    vocabulary: int,
    device: torch.device | str,
    logger: logging.Logger,
) -> Lookups | None:
    """As `Lookups`, with a line in the log; None where branches are not looked up."""
    if not wants_lookups():
        return None
    lookups = Lookups(rows, caps, context, vocabulary, device)
    logger.info(
        "eagle-plugin: branches are looked up in the last %d tokens of each request (%.1f MiB on %s)",
        lookups.history.tokens.shape[1],
        lookups.nbytes / 2**20,
        device,
    )
    return lookups
