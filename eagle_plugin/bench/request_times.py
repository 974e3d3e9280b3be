"""The times of one request: TTFT, TPOT, ITL and OTPS, as every table of this benchmark means them.

- TTFT: from sending the request to the first chunk with text.
- TPOT: (end - first chunk) / (tokens - 1), with the tokens that the engine counts (`usage.completion_tokens`).
- ITL: the time between two chunks with text. With speculation a chunk holds all tokens of a round, so the ITL is the
  time of a round and not of a token. Other tools mean TPOT by ITL, or divide by chunks: compare TPOT between tools.
- OTPS: output tokens per second of one request, 1 / TPOT.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from eagle_plugin.bench.load import Completion


class RequestTimes(NamedTuple):
    """Medians over requests; None where no request has such a time (answers of a single token or chunk)."""

    ttft_ms: float
    tpot_ms: float | None
    itl_ms: float | None
    otps: float | None


def tpot_s(answer: Completion) -> float | None:
    """Seconds per output token after the first; None for an answer without a second one."""
    if answer.completion_tokens < 2:
        return None
    return (answer.total_s - answer.ttft_s) / (answer.completion_tokens - 1)


def median_times(answers: Sequence[Completion]) -> RequestTimes:
    """The medians over at least one answer; the ITL's is over all gaps of all answers."""
    per_token = [seconds for answer in answers if (seconds := tpot_s(answer)) is not None]
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    rates = [1 / seconds for seconds in per_token if seconds > 0]
    return RequestTimes(
        1e3 * statistics.median(answer.ttft_s for answer in answers),
        1e3 * statistics.median(per_token) if per_token else None,
        1e3 * statistics.median(gaps) if gaps else None,
        statistics.median(rates) if rates else None,
    )


def accepted_counts(answers: Iterable[Completion]) -> list[int]:
    """In how many rounds 0, 1, 2, ... drafts or more were accepted; the first number is that of all rounds."""
    exactly = [sum(row) for row in itertools.zip_longest(*(a.accepted_drafts for a in answers), fillvalue=0)]
    return list(itertools.accumulate(reversed(exactly)))[::-1]
