"""Asks a server in a closed loop: each client asks its next question as soon as its last answer is complete."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from openai import AsyncOpenAI

from eagle_plugin.bench.engine import EngineEndpoint
from eagle_plugin.bench.load import Completion, Sampling, connect, served_model, stream_chat
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.request_times import RequestTimes, median_times


class Ask(NamedTuple):
    """One question and the most tokens of its answer."""

    question: Question
    max_tokens: int


class Phase(NamedTuple):
    """A number of clients and the list of questions that they take from together, in order."""

    clients: int
    asks: Sequence[Ask]


class Mark(NamedTuple):
    """A moment on the clock of time.perf_counter, and the processor time that the server had used until then."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Answer:
    """One answer: the phase in which it was asked, and the number of its tokens at each arrival."""

    phase: int
    completion: Completion
    ended: float  # on the clock of time.perf_counter
    arrivals: tuple[tuple[float, int], ...]  # (clock, tokens so far), both increasing

    def tokens_at(self, moment: float) -> int:
        """Tokens that had arrived at that moment."""
        place = bisect.bisect_right(self.arrivals, moment, key=lambda arrival: arrival[0])
        return self.arrivals[place - 1][1] if place else 0


@dataclass(frozen=True)
class Window:
    """What was measured between two marks: while the clients of one phase were all busy."""

    begin: Mark
    end: Mark
    tokens: int
    asked: tuple[Completion, ...]  # the answers to this phase's questions, those that ended later included
    finished: tuple[Completion, ...]  # those of them that ended within the window

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.end.seconds - self.begin.seconds

    @property
    def tokens_per_s(self) -> float:
        """Output tokens that arrived in the window per second of it."""
        return self.tokens / self.seconds

    @property
    def cpu_seconds_per_token(self) -> float:
        """Processor time of the server's processes in the window, per output token."""
        return (self.end.cpu_seconds - self.begin.cpu_seconds) / self.tokens

    @property
    def times(self) -> RequestTimes:
        """Medians over the answers that ended within the window, or over all where none did."""
        return median_times(self.finished or self.asked)


def cut_windows(marks: Sequence[Mark], answers: Sequence[Answer]) -> list[Window]:
    """One window per phase: from its mark to the next one; there is one mark more than phases.

    Tokens count for the window in which they arrived, so that answers across a border count on both sides.
    """
    windows = []
    for phase, (begin, end) in enumerate(itertools.pairwise(marks)):
        asked = [answer for answer in answers if answer.phase == phase]
        windows.append(
            Window(
                begin,
                end,
                sum(answer.tokens_at(end.seconds) - answer.tokens_at(begin.seconds) for answer in answers),
                tuple(answer.completion for answer in asked),
                tuple(answer.completion for answer in asked if answer.ended <= end.seconds),
            )
        )
    return windows


async def run_phases(
    server: EngineEndpoint,
    phases: Sequence[Phase],
    temperature: float = 0.0,
    cpu_seconds: Callable[[], float] = lambda: 0.0,
    on_done: Callable[[int], None] = lambda answers: None,
) -> list[Window]:
    """Run the phases without a gap between them, and return their windows. Raises LoadError.

    A phase begins when its first question is asked: as soon as the list of the phase before is used up and fewer than
    `clients` answers are under way. The last window ends when a client finds no further question, so that every
    window has all of its clients busy.
    """
    marks: list[Mark] = []
    answers: list[Answer] = []
    running: set[asyncio.Task[Answer]] = set()

    async def wait_for_one() -> None:
        nonlocal running
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        answers.extend(task.result() for task in done)
        on_done(len(answers))

    async with connect(server) as client:
        model = await served_model(client)
        try:
            for number, phase in enumerate(phases):
                for place, ask in enumerate(phase.asks):
                    while len(running) >= phase.clients:
                        await wait_for_one()
                    if place == 0:
                        marks.append(Mark(time.perf_counter(), cpu_seconds()))
                    coroutine = _answer(client, server, model, number, ask, temperature)
                    running.add(asyncio.create_task(coroutine))
            await wait_for_one()
            marks.append(Mark(time.perf_counter(), cpu_seconds()))
            while running:
                await wait_for_one()
        except BaseException:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            raise
    return cut_windows(marks, answers)


async def _answer(
    client: AsyncOpenAI, server: EngineEndpoint, model: str, phase: int, ask: Ask, temperature: float
) -> Answer:
    arrivals: list[tuple[float, int]] = []
    sampling = Sampling(max_tokens=ask.max_tokens, temperature=temperature)
    completion = await stream_chat(
        client,
        server.engine,
        model,
        ask.question,
        sampling,
        on_tokens=lambda tokens: arrivals.append((time.perf_counter(), tokens)),
    )
    ended = time.perf_counter()
    return Answer(phase, completion, ended, (*arrivals, (ended, completion.completion_tokens)))


def ask_in_phases(
    server: EngineEndpoint,
    phases: Sequence[Phase],
    temperature: float = 0.0,
    cpu_seconds: Callable[[], float] = lambda: 0.0,
    on_done: Callable[[int], None] = lambda answers: None,
) -> list[Window]:
    """`run_phases` for callers without an event loop."""
    return asyncio.run(run_phases(server, phases, temperature, cpu_seconds, on_done))
