"""Finds prefixes so long that what a token of them costs a forward can be told from what single runs scatter.

Costs are used with all tokens that a server's caches hold, often some 500,000: a slope from few tokens, which add as
much to a forward as it scatters, would be believed a hundred times as far away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import count, islice

from eagle_plugin.runtime.round_costs import has_room

REQUESTS = 4  # with the first prefixes that are tried, at most
FIRST = 1024  # tokens of each of these prefixes
FACTOR = 4  # of the tokens of all prefixes, from one try to the next
MOST = 2**19  # tokens of all prefixes
ENOUGH = 1.0  # by which share of its time a forward over long prefixes takes longer than one over short ones
RUNS = 2  # of each forward in a try, of which the shortest counts
SECONDS = 2.0  # of a try: there is no further one that would take longer. A start waits for it, on CPUs for all of it

Batch = tuple[int, int]  # requests, and tokens of the prefix of each
# Runs the same forwards over a batch one by one, and gives the seconds of each.
TargetTimes = Callable[[int, int], Generator[float, None, None]]


def growing_batches(sizes: Sequence[int], longest: Callable[[int], int]) -> list[Batch]:
    """Batches whose prefixes have ever more tokens together, with more requests only where one has no more room.

    sizes: requests of the batches that can be measured, ascending. longest(b): tokens of each prefix for which b
    requests have room.
    """
    few = max((b for b in sizes if b <= REQUESTS), default=min(sizes, default=0))
    rooms = {b: min(longest(b), MOST // b) for b in sizes if b >= few}
    if not rooms:
        return []
    largest = max(rooms, key=lambda b: (b * rooms[b], -b))
    found, keys = [], few * FIRST
    while keys < largest * rooms[largest]:
        found.append(next((b, keys // b) for b, room in rooms.items() if keys // b <= room))
        keys *= FACTOR
    return [*found, (largest, rooms[largest])]


def long_batch(
    batches: Sequence[Batch], times: TargetTimes, short: int, in_any_rank: Callable[[bool], bool]
) -> Batch | None:
    """The first of the batches over which every forward takes so much longer than over prefixes of `short` tokens.

    Else the last for which there is time and memory; None where there is none for the first. All ranks try the same.
    """
    found, short_times = None, dict[int, list[float] | None]()
    for b, prefix in batches:
        begin = time.perf_counter()
        if b not in short_times:
            short_times[b] = _shortest(times, b, short, in_any_rank)
        at_short, at_length = short_times[b], _shortest(times, b, prefix, in_any_rank)
        if at_short is None or at_length is None:
            break
        found = b, prefix
        longer = min(now / before - 1 for now, before in zip(at_length, at_short, strict=True))
        is_late = (time.perf_counter() - begin) * FACTOR > SECONDS
        if in_any_rank(is_late) or not in_any_rank(longer < ENOUGH):
            break
    return found


def _shortest(times: TargetTimes, b: int, prefix: int, in_any_rank: Callable[[bool], bool]) -> list[float] | None:
    """Of each forward the shortest run; None where memory ends in any rank."""
    runs = []
    for _ in range(RUNS):
        with closing(times(b, prefix)) as forwards:
            run = _one_run(forwards, in_any_rank)
        if run is None:
            return None
        runs.append(run)
    return [min(seconds) for seconds in zip(*runs, strict=True)]


def _one_run(forwards: Iterator[float], in_any_rank: Callable[[bool], bool]) -> list[float] | None:
    """The seconds of each forward, which begins when all ranks had memory for the one before it."""
    found: list[float] = []
    for known in count():
        if in_any_rank(not has_room(lambda: found.extend(islice(forwards, 1)))):
            return None
        if len(found) == known:
            break
    return found
