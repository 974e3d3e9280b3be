"""Lets servers take turns under the same load: one answers, the others are paused, and each is first in its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from eagle_plugin.bench.closed_loop import Phase, Window, ask_in_phases
from eagle_plugin.bench.load import Sampling, ask_all, flush_prefix_cache
from eagle_plugin.bench.other_load import OtherLoad
from eagle_plugin.bench.policy_sources import counted_errors
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.steal import StealWatch, Watched
from eagle_plugin.policy.draft_times import DraftTimes, newest
from eagle_plugin.policy.prediction_errors import added

WARM_UP_TOKENS, WARM_UP_CHARACTERS = 8, 500
Name = TypeVar("Name", bound=str)
Load = TypeVar("Load")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Turn(Generic[Load]):
    """One repeat of one load: every server is measured once under it."""

    repeat: int
    place: int  # of the load in the plan; with the repeat it decides which server is first
    load: Load
    label: str


@dataclass(frozen=True)
class Taken(Generic[Name, Load, Result]):
    """What one server did in a turn."""

    name: Name
    turn: Turn[Load]
    value: Result
    steal: float | None
    is_last: bool  # of the turn's servers


def take_turns(
    servers: Mapping[Name, Server],
    turns: Sequence[Turn[Load]],
    measure: Callable[[Server, Load], Result],
    watch: StealWatch | None = None,
    update: Callable[[str, float], None] = lambda detail, share: None,
    is_measured: Callable[[Name, Turn[Load]], bool] = lambda name, turn: False,
) -> Iterator[Taken[Name, Load, Result]]:
    """Measure every server in every turn, and yield each result as it is made: who stops reading ends the run.

    With a `watch`, a span that had too much steal is measured again. `update` gets what is measured now, and the share
    that is done.
    """
    total, names, done = len(turns) * len(servers), list(servers), 0
    for turn in turns:
        first = (turn.repeat + turn.place) % len(names)
        order = names[first:] + names[:first]
        for name in order:
            if not is_measured(name, turn):
                update(f"{turn.label}, {name}", done / total)
                span = partial(measure, servers[name], turn.load)
                found = watch.least_stolen(span, f"{turn.label}, {name}") if watch else Watched(span(), None)
                yield Taken(name, turn, found.value, found.steal, name == order[-1])
            done += 1


class Loaded(NamedTuple):
    """What one server did under load, and the part of the machine that other processes used meanwhile."""

    windows: list[Window]
    others: float
    prediction_errors: tuple[int, ...]  # its policy's timed steps, see `policy.prediction_errors`; empty without any
    drafts: DraftTimes = DraftTimes()  # of its rounds, where it writes them into its log


def run_load(server: Server, phases: Sequence[Phase], temperature: float) -> Loaded:
    """Put one paused server under load, with an empty prefix cache; it is paused again afterwards. Raises LoadError."""
    server.resume()
    try:
        # Until now memory and CPU caches held another server's data. The start of a long prompt is enough.
        question = phases[0].asks[0].question
        short = question.model_copy(update={"prompt": question.prompt[:WARM_UP_CHARACTERS]})
        warm_up(server, [short], max_tokens=WARM_UP_TOKENS)
        flush_prefix_cache(server.endpoint)
        cpu_seconds = server.cpu_clock()
        other = OtherLoad(cpu_seconds)
        log_before = server.log_text()
        windows = ask_in_phases(server.endpoint, phases, temperature, cpu_seconds)
        others = other.share()
        log = server.log_text()
        errors = added(counted_errors(log), counted_errors(log_before))
        return Loaded(windows, others, errors, newest(log).since(newest(log_before)))
    except Exception:
        server.check_alive()  # raises the better explanation if the server has ended
        raise
    finally:
        server.pause()


def warm_up(server: Server, questions: Sequence[Question], max_tokens: int = 32) -> None:
    """Answer a few questions unmeasured: the engine imports and compiles parts of itself on the first requests."""
    ask_all(server.endpoint, questions, Sampling(max_tokens=max_tokens))


def warm_up_under_load(
    servers: Mapping[Name, Server],
    questions: Sequence[Question],
    clients: int,
    temperatures: Iterable[float],
    steps: Steps,
) -> None:
    """Answer short requests, one and then `clients` at a time: engines prepare each batch size at its first use."""
    repeated = (list(questions) * -(-clients // len(questions)))[:clients]
    with steps.step("warming up") as step:
        for number, server in enumerate(servers.values()):
            step.update(server.label, number / len(servers))
            server.resume()
            warm_up(server, questions[:1])
            for temperature in temperatures:
                sampling = Sampling(max_tokens=WARM_UP_TOKENS, temperature=temperature)
                ask_all(server.endpoint, repeated, sampling, concurrency=clients)
            server.pause()


def watch_steal(spans: int, steps: Steps) -> StealWatch:
    """A watch over so many spans, which tells the user of each span that is measured again."""
    return StealWatch(spans, lambda text: steps.log(f"[yellow]{text}[/]"))
