"""The order of documents: which ones are in the next update, and which rank computes which of them.

Every process computes the same order from the seed, so nothing is sent, and a run resumes from two numbers: the epoch
and how many documents of it are done. A batch is that of all ranks together, so a recipe means the same on any number
of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

WINDOW = 512  # documents that are sorted by length together
GROUP = 16  # neighbours by length that stay together
GPU_TOKENS = 8192  # of one forward on a GPU, whose memory the activations of a whole update may exceed


@dataclass(frozen=True)
class Position:
    """Where a run is: documents `done` of epoch `epoch`, and what was trained on before."""

    epoch: int = 0
    done: int = 0
    update: int = 0
    tokens: int = 0


class DocumentOrder:
    """The documents of every epoch in their order.

    lengths [documents] in tokens, of the training split; weights [documents]: how often an epoch takes a document; a
    fraction is the probability of one more time.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._weights = np.asarray(weights, dtype=np.float64)
        self._seed = seed
        self._order = lru_cache(2)(self._make_order)

    def next_batch(self, position: Position, batch_tokens: int) -> tuple[list[int], Position]:
        """Indices of the documents of the next update (at least one), and the position after it."""
        epoch, done = position.epoch, position.done
        while done >= len(order := self._order(epoch)):
            epoch, done = epoch + 1, 0
        # No document is shorter than a token.
        lengths = np.cumsum(self._lengths[order[done : done + batch_tokens]])
        count = max(1, int(np.searchsorted(lengths, batch_tokens, side="right")))
        chosen = order[done : done + count].tolist()
        tokens = position.tokens + int(lengths[count - 1])
        return chosen, Position(epoch, done + count, position.update + 1, tokens)

    def epochs(self, position: Position) -> float:
        """Epochs that are done, with the fraction of the current one."""
        return position.epoch + position.done / max(1, len(self._order(position.epoch)))

    def _make_order(self, epoch: int) -> np.ndarray:
        random = np.random.default_rng([self._seed, epoch])
        copies = np.floor(self._weights + random.random(len(self._weights))).astype(np.int64)
        order = random.permutation(np.repeat(np.arange(len(copies)), copies))
        groups = []
        for start in range(0, len(order), WINDOW):
            window = order[start : start + WINDOW]
            window = window[np.argsort(self._lengths[window], kind="stable")]
            parts = [window[i : i + GROUP] for i in range(0, len(window), GROUP)]
            groups += [parts[i] for i in random.permutation(len(parts))]
        return np.concatenate(groups) if groups else order


def forward_limit(micro_tokens: int | None, device: str) -> int | None:
    """The most tokens of one forward on a device of this type, of a recipe's `micro_tokens`; None: no limit."""
    return GPU_TOKENS if micro_tokens is None and device == "cuda" else micro_tokens


@dataclass(frozen=True)
class MicroBatch:
    """The documents of one forward of one rank; an idle one only keeps the ranks synchronous, its weights must be 0."""

    documents: list[int]
    idle: bool = False


def assign_documents(
    documents: Sequence[int], lengths: Sequence[int], world: int, micro_tokens: int | None
) -> list[list[MicroBatch]]:
    """Assign documents to `world` ranks by length; every rank gets as many forwards of at most `micro_tokens` tokens.

    lengths [len(documents)]. A document longer than micro_tokens has a forward of its own.
    """
    ranks: list[list[int]] = [[] for _ in range(world)]
    loads = [0] * world
    order = range(len(documents)) if world == 1 else sorted(range(len(documents)), key=lambda i: -lengths[i])
    for i in order:
        lightest = loads.index(min(loads))
        ranks[lightest].append(i)
        loads[lightest] += lengths[i]
    shares: list[list[MicroBatch]] = []
    for rank in ranks:
        micros: list[list[int]] = []
        room = 0
        for i in rank:
            if not micros or (micro_tokens is not None and lengths[i] > room):
                micros.append([])
                room = micro_tokens or 0
            micros[-1].append(documents[i])
            room -= lengths[i]
        shares.append([MicroBatch(part) for part in micros])
    most = max(map(len, shares))
    shortest = documents[min(range(len(documents)), key=lambda i: lengths[i])]
    return [share + [MicroBatch([shortest], idle=True)] * (most - len(share)) for share in shares]
