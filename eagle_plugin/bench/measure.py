"""Compares servers on the same questions, one request at a time, in interleaved repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_plugin.bench.load import Completion, Sampling, accept_length, ask_all, flush_prefix_cache
from eagle_plugin.bench.quartiles import ratio_quartiles
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.steal import StealWatch
from eagle_plugin.bench.stream_fields import Output
from eagle_plugin.bench.turns import Name, Turn, take_turns, warm_up


@dataclass(frozen=True)
class Repeat:
    """What one server answered in one repeat, one request at a time."""

    completions: tuple[Completion, ...]

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens per second of waiting, prefill included."""
        return sum(c.completion_tokens for c in self.completions) / sum(c.total_s for c in self.completions)

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per output token after the first, over all answers of the repeat."""
        tokens = sum(c.completion_tokens - 1 for c in self.completions)
        return 1e3 * sum(c.total_s - c.ttft_s for c in self.completions) / max(tokens, 1)

    @property
    def ttft_ms(self) -> float:
        """Median milliseconds to the first token."""
        return 1e3 * statistics.median(c.ttft_s for c in self.completions)


@dataclass(frozen=True)
class RepeatSeries:
    """All repeats of one server, in the order in which they were measured."""

    repeats: tuple[Repeat, ...]

    @property
    def tokens_per_s(self) -> list[float]:
        """Tokens per second of each repeat."""
        return [repeat.tokens_per_s for repeat in self.repeats]

    @property
    def tpot_ms(self) -> list[float]:
        """Time per output token of each repeat."""
        return [repeat.tpot_ms for repeat in self.repeats]

    @property
    def ttft_ms(self) -> list[float]:
        """Time to the first token of each repeat."""
        return [repeat.ttft_ms for repeat in self.repeats]

    @property
    def accept_length(self) -> float | None:
        """Mean accept length over every measured request; None without speculation."""
        return accept_length(completion for repeat in self.repeats for completion in repeat.completions)

    @property
    def responses(self) -> list[Output]:
        """Every answer, in the order of the questions."""
        return [completion.output for repeat in self.repeats for completion in repeat.completions]


@dataclass
class EarlyStop:
    """Decides after each repeat whether a comparison may end before its last repeat, and keeps the reason.

    `ratios` are (numerator, denominator) pairs of server names; the first is the result that the comparison is for.
    """

    ratios: Sequence[tuple[str, str]]
    min_repeats: int = 3
    relative_width: float = 0.05  # enough if the quartiles of the first ratio are closer than this part of its median
    decided_seconds: float = float("inf")  # then it is enough if the quartiles of every ratio are on one side of 1
    most_seconds: float = float("inf")  # then it is enough
    reason: str = "every repeat was made"
    began: float = field(default_factory=time.monotonic)

    def __call__(self, series: Mapping[Any, RepeatSeries]) -> bool:
        """Whether the repeats so far are enough."""
        rates = {name: one.tokens_per_s for name, one in series.items()}
        spreads = [ratio_quartiles(rates[ours], rates[theirs]) for ours, theirs in self.ratios]
        if len(rates[self.ratios[0][0]]) < self.min_repeats:
            return False
        width = spreads[0].relative_width
        if width < self.relative_width:
            self.reason = f"the quartiles of {' over '.join(self.ratios[0])} are {width:.1%} of its median apart"
            return True
        seconds = time.monotonic() - self.began
        if seconds > self.decided_seconds and all(one.q1 > 1 or one.q3 < 1 for one in spreads):
            self.reason = f"{seconds:.0f} s of measuring, and the quartiles of every ratio are on one side of 1"
            return True
        if seconds > self.most_seconds:
            self.reason = f"{seconds:.0f} s of measuring"
            return True
        return False


def run_repeat(server: Server, questions: Sequence[Question], sampling: Sampling) -> Repeat:
    """Let one server answer the questions of one repeat, with an empty prefix cache; it is paused before and after."""
    server.resume()
    try:
        warm_up(server, questions[:1], max_tokens=8)  # until now memory and CPU caches held another server's data
        flush_prefix_cache(server.endpoint)
        return Repeat(tuple(ask_all(server.endpoint, questions, sampling)))
    except Exception:
        server.check_alive()  # raises the better explanation if the server has ended
        raise
    finally:
        server.pause()


def measure_interleaved(
    servers: Mapping[Name, Server],
    repeats: Sequence[Sequence[Question]],
    sampling: Sampling,
    update: Callable[[str, float], None] = lambda detail, share: None,
    enough: Callable[[Mapping[Name, RepeatSeries]], bool] = lambda series: False,
    watch: StealWatch | None = None,
) -> dict[Name, RepeatSeries]:
    """Ask every server the questions of every repeat, in another order of servers each time (`take_turns`).

    The measurement ends when `enough` returns true for the repeats so far, which are complete: each server has
    answered the same questions. With a `watch`, a repeat of one server that had too much steal is made again.
    """
    done: dict[Name, list[Repeat]] = {name: [] for name in servers}
    turns = [Turn(i, 0, questions, f"repeat {i + 1} of {len(repeats)}") for i, questions in enumerate(repeats)]
    series: dict[Name, RepeatSeries] = {}
    for taken in take_turns(servers, turns, lambda server, load: run_repeat(server, load, sampling), watch, update):
        done[taken.name].append(taken.value)
        if taken.is_last:
            series = {name: RepeatSeries(tuple(measured)) for name, measured in done.items()}
            if enough(series):
                break
    return series
