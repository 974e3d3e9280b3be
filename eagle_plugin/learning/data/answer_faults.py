"""Which generated answers teach a head nothing, by their tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

SHORTEST = 8  # tokens; shorter answers are dropped
LOOP_TAIL = 256  # tokens at the end of an answer in which `is_looping` searches
LOOP_TAIL_MIN = 64  # in a shorter tail a loop looks the same as an intended repetition
LOOP_PERIOD = 32


def answer_fault(ids: Sequence[int]) -> tuple[str, str] | None:
    """Why an answer is dropped, as a kind that is counted and a reason; None if it is kept."""
    if len(ids) < SHORTEST:
        return "too short", f"the answer has fewer than {SHORTEST} tokens"
    if is_looping(ids):
        return "looping", "the answer repeats itself"
    return None


def is_looping(ids: Sequence[int]) -> bool:
    """Whether the end of an answer repeats with a period of 1 to 32 tokens.

    The end is its last 256 tokens. For shorter answers it is the last half, if that has 64 tokens or more.
    """
    tail = ids[-LOOP_TAIL:] if len(ids) >= LOOP_TAIL else ids[len(ids) // 2 :]
    return len(tail) >= LOOP_TAIL_MIN and any(tail[p:] == tail[:-p] for p in range(1, LOOP_PERIOD + 1))
