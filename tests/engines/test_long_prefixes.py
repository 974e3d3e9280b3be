"""Over which prefixes slopes are measured: as long as they must be to be told from noise, as long as there is room."""

from __future__ import annotations

from collections.abc import Generator
from itertools import count

import pytest
import torch

from eagle_plugin.runtime import long_prefixes
from eagle_plugin.runtime.long_prefixes import FACTOR, FIRST, MOST, growing_batches, long_batch

SIZES = [1, 2, 4, 8, 16, 32, 64]


def test_there_are_more_requests_only_where_contexts_end() -> None:
    assert growing_batches(SIZES, lambda b: 2**17) == [(4, 1024), (4, 4096), (4, 16384), (4, 65536), (4, 2**17)]
    assert growing_batches(SIZES, lambda b: 8192) == [(4, 1024), (4, 4096), (8, 8192), (32, 8192), (64, 8192)]
    assert growing_batches(SIZES, lambda b: min(40_000, 100_000 // b)) == [
        (4, 1024),
        (4, 4096),
        (4, 16384),
        (4, 25_000),
    ]
    assert growing_batches(SIZES, lambda b: 500)[-1] == (64, 500)
    assert growing_batches([16, 24], lambda b: 1200)[0] == (16, 1024)  # the fewest that were captured
    assert growing_batches([], lambda b: 8192) == []
    for b, prefix in growing_batches(SIZES, lambda b: 10**7):
        assert b * prefix <= MOST


class Times:
    """Two forwards; a token of the prefixes adds a millionth to each."""

    def __init__(self, most: int = MOST) -> None:
        """most: tokens of prefixes for which there is memory."""
        self.ran, self._most = list[tuple[int, int]](), most

    def __call__(self, b: int, prefix: int) -> Generator[float, None, None]:
        self.ran.append((b, prefix))
        for seconds in (1.0, 2.0):
            if b * prefix > self._most:
                raise torch.OutOfMemoryError("no memory")
            yield seconds * (1 + b * prefix / 1e5)


BATCHES = [(4, FIRST * FACTOR**n) for n in range(4)]


def test_the_first_prefixes_are_taken_that_make_forwards_long_enough() -> None:
    times = Times()
    assert long_batch(BATCHES, times, 16, bool) == (4, FIRST * FACTOR**3)  # 3.6 times as long; before it 1.7 times
    assert long_batch(BATCHES[:2], times, 16, bool) == BATCHES[1]  # there is no more room
    assert long_batch([], times, 16, bool) is None
    assert times.ran[:4] == [(4, 16)] * 2 + [BATCHES[0]] * 2


def test_where_memory_ends_the_prefixes_before_are_taken() -> None:
    assert long_batch(BATCHES, Times(most=4 * FIRST * FACTOR), 16, bool) == BATCHES[1]
    assert long_batch(BATCHES, Times(most=0), 16, bool) is None
    # In another rank, in the first forward over the third batch: before it 2 runs of 2 forwards and their end for short
    # prefixes and for two batches, and each time whether it was late.
    asked = count(1)
    assert long_batch(BATCHES, Times(), 16, lambda mine: mine or next(asked) == 3 * 6 + 2 + 1) == BATCHES[1]


def test_a_slow_machine_tries_no_longer_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prefixes, "SECONDS", 0.0)
    assert long_batch(BATCHES, Times(), 16, bool) == BATCHES[0]
