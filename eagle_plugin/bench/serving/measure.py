"""Measure all servers under each cell's load, interleaved, and keep what is measured in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from eagle_plugin.bench.load import Sampling, accept_length, ask_all, flush_prefix_cache
from eagle_plugin.bench.measure import Name, warm_up
from eagle_plugin.bench.other_load import OtherLoad
from eagle_plugin.bench.policy_sources import counted_errors
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.report import Strict
from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.serving.closed_loop import Phase, Window, ask_in_phases
from eagle_plugin.bench.serving.configs import Config
from eagle_plugin.bench.serving.outputs import save
from eagle_plugin.bench.serving.plan import Cell, Plan, requests_of
from eagle_plugin.bench.serving.prompts import PromptKind, select_asks
from eagle_plugin.bench.serving.report import Measurement
from eagle_plugin.bench.steal import StealWatch
from eagle_plugin.policy.draft_times import DraftTimes, newest
from eagle_plugin.policy.prediction_errors import added

WARM_UP_TOKENS, WARM_UP_CHARACTERS = 8, 500


class Unfinished(Strict):
    """The file of a run that is not finished: what its measurements depend on; the measurements are in subclasses."""

    identity: dict[str, str]


Kept = TypeVar("Kept", bound=Unfinished)


class Measured(Unfinished):
    """The measurements of the serving benchmark until now."""

    measurements: list[Measurement] = []

    def get(self, repeat: int, cell: Cell, config: Config) -> Measurement | None:
        """That measurement, if it was made."""
        for one in self.measurements:
            if (one.repeat, one.cell, one.config) == (repeat, cell, config):
                return one
        return None


def resume_from(path: Path, identity: dict[str, str], kind: type[Kept]) -> Kept:
    """The measurements in `path`, none if there is no such file; ValueError if they are of other settings."""
    if not path.exists():
        return kind(identity=identity)
    try:
        found = kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a file of measurements"
        raise ValueError(f"--resume: {path} cannot be read ({reason}); remove it to start again") from None
    for name in sorted(identity.keys() | found.identity.keys()):
        before, now = found.identity.get(name), identity.get(name)
        if before != now:
            raise ValueError(
                f"--resume: {path} was measured with {name} {before}, this run has {now}; "
                "use the same options, or leave --resume out to start again"
            )
    return found


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


def measure_plan(
    servers: Mapping[Config, Server],
    plan: Plan,
    questions: Mapping[PromptKind, Sequence[Question]],
    measured: Measured,
    path: Path,
    steps: Steps,
) -> StealWatch:
    """Add the missing measurements of the plan to `measured`, and write it to `path` after each of them."""

    def is_measured(repeat: int, cell: Cell, config: Config) -> bool:
        return measured.get(repeat, cell, config) is not None

    def keep(repeat: int, cell: Cell, config: Config, loaded: Loaded, steal: float | None) -> None:
        measured.measurements.append(_measurement(repeat, cell, config, loaded, steal))
        save(measured, path)

    return measure_turns(servers, plan, questions, is_measured, keep, steps)


def measure_turns(
    servers: Mapping[Name, Server],
    plan: Plan,
    questions: Mapping[PromptKind, Sequence[Question]],
    is_measured: Callable[[int, Cell, Name], bool],
    keep: Callable[[int, Cell, Name, Loaded, float | None], None],
    steps: Steps,
) -> StealWatch:
    """Put every server under the load of every cell, and call `keep` with what it did and the steal.

    In every repeat of a cell all servers answer the same questions, each in another place of the order than before.
    """
    turns, cells = list(plan.turns()), list(plan.repeats)
    total = len(turns) * len(servers)
    watch = StealWatch(total, lambda text: steps.log(f"[yellow]{text}[/]"))
    done = 0
    with steps.step("measuring") as step:
        for repeat, cell in turns:
            names = list(servers)
            first = (repeat + cells.index(cell)) % len(names)
            count = requests_of(cell.concurrency, cell.prompts)
            asks = select_asks(questions[cell.prompts], repeat * count, count, plan.max_tokens(cell))
            for name in names[first:] + names[:first]:
                if not is_measured(repeat, cell, name):
                    step.update(f"repeat {repeat + 1}, {cell}, {name}", done / total)
                    phases = [Phase(cell.concurrency, asks)]
                    server = servers[name]
                    loaded, steal = watch.least_stolen(
                        lambda server=server, phases=phases, cell=cell: run_load(server, phases, cell.temperature),  # type: ignore[misc]
                        f"{cell}, {name}",
                    )
                    keep(repeat, cell, name, loaded, steal)
                done += 1
    return watch


def _measurement(repeat: int, cell: Cell, config: Config, loaded: Loaded, steal: float | None) -> Measurement:
    (window,) = loaded.windows
    length = accept_length(window.asked)
    return Measurement(
        repeat=repeat,
        concurrency=cell.concurrency,
        temperature=cell.temperature,
        prompts=cell.prompts,
        config=config,
        tokens_per_s=round(window.tokens_per_s, 3),
        seconds=round(window.seconds, 3),
        tokens=window.tokens,
        requests=len(window.asked),
        cpu_seconds_per_token=round(window.cpu_seconds_per_token, 6),
        ttft_ms=round(window.ttft_ms, 1),
        tpot_ms=round(window.tpot_ms, 2),
        accept_length=None if length is None else round(length, 3),
        steal=None if steal is None else round(steal, 4),
        others=round(loaded.others, 3),
        prediction_errors=loaded.prediction_errors,
    )
