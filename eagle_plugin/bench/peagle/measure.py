"""Measure the servers of the benchmark of P-EAGLE, one group after the other, and keep what is measured in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from eagle_plugin.bench.load import accept_length
from eagle_plugin.bench.peagle.configs import Config, Form, group_configs
from eagle_plugin.bench.peagle.report import Measurement
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.serving.measure import Loaded, Unfinished, measure_turns, warm_up_under_load
from eagle_plugin.bench.serving.outputs import save, steal_count
from eagle_plugin.bench.serving.plan import Cell, Plan
from eagle_plugin.bench.serving.preparation import version_of
from eagle_plugin.bench.serving.prompts import PromptKind
from eagle_plugin.bench.serving.report import StealCount
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.startup import serving

MIB = 2**20


class Measured(Unfinished):
    """The measurements until now."""

    measurements: list[Measurement] = []

    def has(self, repeat: int, cell: Cell, config: Config) -> bool:
        """Whether that measurement was made."""
        wanted = repeat, cell.concurrency, cell.prompts, config
        return any((one.repeat, one.concurrency, one.prompts, one.config) == wanted for one in self.measurements)


class Group(NamedTuple):
    """Servers that run at the same time and are measured interleaved."""

    form: Form
    ks: Sequence[int]
    specs: Mapping[str, ServerSpec]

    @property
    def configs(self) -> dict[str, Config]:
        """The servers' configurations by name."""
        return {str(config): config for config in group_configs(self.form, self.ks)}

    def is_measured(self, plan: Plan, measured: Measured) -> bool:
        """Whether nothing of the plan is missing."""
        return all(
            measured.has(repeat, cell, config) for repeat, cell in plan.turns() for config in self.configs.values()
        )


def measure_group(
    group: Group,
    plan: Plan,
    questions: Mapping[PromptKind, Sequence[Question]],
    measured: Measured,
    path: Path,
    logs: Path,
    steps: Steps,
) -> tuple[str, StealCount]:
    """Start the servers of a group, add their missing measurements to `measured`, and write it after each of them.

    Returns the engine's version and the steal. Raises ServerError or LoadError.
    """
    configs = group.configs

    def is_measured(repeat: int, cell: Cell, name: str) -> bool:
        return measured.has(repeat, cell, configs[name])

    with serving(group.specs, logs, steps) as servers:

        def keep(repeat: int, cell: Cell, name: str, loaded: Loaded, steal: float | None) -> None:
            memory = servers[name].memory_bytes() / MIB
            measured.measurements.append(measurement(repeat, cell, configs[name], loaded, steal, memory))
            save(measured, path)

        asked = next(iter(questions.values()))
        warm_up_under_load(servers, asked, plan.max_concurrency, {cell.temperature for cell in plan.repeats}, steps)
        version = version_of(next(iter(servers.values())))
        watch = measure_turns(servers, plan, questions, is_measured, keep, steps)
    return version, steal_count(watch)


def measurement(
    repeat: int, cell: Cell, config: Config, loaded: Loaded, steal: float | None, memory_mib: float
) -> Measurement:
    """What one server did under load."""
    (window,) = loaded.windows
    length, draft_ms = accept_length(window.asked), loaded.drafts.mean_ms
    return Measurement(
        repeat=repeat,
        concurrency=cell.concurrency,
        prompts=cell.prompts,
        kind=config.kind,
        form=config.form,
        shape=(config.shape.steps, config.shape.topk, config.shape.width),
        tokens_per_s=round(window.tokens_per_s, 3),
        seconds=round(window.seconds, 3),
        requests=len(window.asked),
        accept_length=None if length is None or config.kind == "plain" else round(length, 3),
        draft_ms=None if draft_ms is None else round(draft_ms, 4),
        drafted_rounds=loaded.drafts.rounds,
        memory_mib=round(memory_mib, 1),
        steal=None if steal is None else round(steal, 4),
        others=round(loaded.others, 3),
    )


def sum_of(counts: Sequence[StealCount]) -> StealCount:
    """The steal of several groups; zero spans without any."""
    spans, over, repeated = (sum(getattr(one, name) for one in counts) for name in ("spans", "over_limit", "repeated"))
    return StealCount(
        limit=counts[0].limit if counts else 0.0,
        spans=spans,
        over_limit=over,
        repeated=repeated,
        over_limit_share=round(over / spans, 3) if spans else None,
    )
