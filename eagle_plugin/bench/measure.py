"""Compare servers on the same questions in interleaved rounds, and sum the rounds up as medians."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from eagle_plugin.bench.load import Completion, Sampling, accept_length, ask_all, flush_prefix_cache
from eagle_plugin.bench.prompts import Prompt
from eagle_plugin.bench.servers import Server

Name = TypeVar("Name", bound=str)


class Spread(NamedTuple):
    """A median with its quartiles."""

    q1: float
    median: float
    q3: float


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles (inclusive method) of at least one value."""
    if not values:
        raise ValueError("no values to summarise; run at least one repeat")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def ratio_spread(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Spread of ours / theirs, repeat by repeat: a slow minute of the machine then hits both sides of a ratio."""
    if len(ours) != len(theirs):
        raise ValueError(f"ratios need the same repeats on both sides, found {len(ours)} and {len(theirs)}")
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


@dataclass(frozen=True)
class Turn:
    """What one server answered in one round, one request at a time."""

    completions: tuple[Completion, ...]

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens per second of waiting, prefill included."""
        return sum(c.completion_tokens for c in self.completions) / sum(c.total_s for c in self.completions)

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per output token after the first, over all answers of the turn."""
        tokens = sum(c.completion_tokens - 1 for c in self.completions)
        return 1e3 * sum(c.total_s - c.ttft_s for c in self.completions) / max(tokens, 1)

    @property
    def ttft_ms(self) -> float:
        """Median milliseconds to the first token."""
        return 1e3 * statistics.median(c.ttft_s for c in self.completions)


@dataclass(frozen=True)
class Series:
    """All turns of one server, in the order of the rounds."""

    turns: tuple[Turn, ...]

    @property
    def tokens_per_s(self) -> list[float]:
        """Tokens per second of each round."""
        return [turn.tokens_per_s for turn in self.turns]

    @property
    def tpot_ms(self) -> list[float]:
        """Time per output token of each round."""
        return [turn.tpot_ms for turn in self.turns]

    @property
    def ttft_ms(self) -> list[float]:
        """Time to the first token of each round."""
        return [turn.ttft_ms for turn in self.turns]

    @property
    def accept_length(self) -> float | None:
        """Mean accept length over every measured request; None without speculation."""
        return accept_length(completion for turn in self.turns for completion in turn.completions)

    @property
    def texts(self) -> list[str]:
        """Every answer, in the order of the questions."""
        return [completion.text for turn in self.turns for completion in turn.completions]


def warm_up(server: Server, prompts: Sequence[Prompt], max_tokens: int = 32) -> None:
    """Answer a few questions unmeasured, so that lazy imports and compilations of the engine are behind it."""
    ask_all(server.endpoint, prompts, Sampling(max_tokens=max_tokens))


def run_turn(server: Server, prompts: Sequence[Prompt], sampling: Sampling) -> Turn:
    """Let one server answer one round; its group runs only meanwhile, and starts with an empty prefix cache."""
    server.resume()
    try:
        warm_up(server, prompts[:1], max_tokens=8)  # memory and CPU caches were another server's until now
        flush_prefix_cache(server.endpoint)
        return Turn(tuple(ask_all(server.endpoint, prompts, sampling)))
    except Exception:
        server.check_alive()  # a dead server is the better explanation of a failed request
        raise
    finally:
        server.pause()


def measure_interleaved(
    servers: Mapping[Name, Server],
    rounds: Sequence[Sequence[Prompt]],
    sampling: Sampling,
    on_turn: Callable[[Name, int, Turn], None] = lambda name, number, turn: None,
) -> dict[Name, Series]:
    """Ask every server every round, in another order each time; all servers but the one asked are paused."""
    turns: dict[Name, list[Turn]] = {name: [] for name in servers}
    orders = itertools.cycle(itertools.permutations(servers))
    for number, (prompts, order) in enumerate(zip(rounds, orders, strict=False)):
        for name in order:
            turn = run_turn(servers[name], prompts, sampling)
            turns[name].append(turn)
            on_turn(name, number, turn)
    return {name: Series(tuple(done)) for name, done in turns.items()}
