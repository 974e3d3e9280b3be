"""Runs a benchmark under load: starts its servers, measures the cells that are missing, and ends with its report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from pydantic import BaseModel
from rich.console import RenderableType
from rich.markup import escape

from eagle_plugin.bench.cells import Plan
from eagle_plugin.bench.machine import describe_machine
from eagle_plugin.bench.measurement import Measured, One, measure_cells, resume_from
from eagle_plugin.bench.outputs import draw, save, versions
from eagle_plugin.bench.preparation import check_busy, version_of
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.startup import Name, serving
from eagle_plugin.bench.steal import StealWatch
from eagle_plugin.bench.turns import warm_up_under_load


def partial_path(path: Path) -> Path:
    """The file of the measurements until the report is complete."""
    return path.with_suffix(".measured.json")


def identify(specs: Mapping[Any, ServerSpec], plan: Plan, **more: str) -> dict[str, str]:
    """What measurements must have in common to be in one report."""
    base = next(iter(specs.values()))
    answers = f"{plan.length:g} of the usual length" if plan.answer_tokens is None else f"{plan.answer_tokens} tokens"
    return {
        "engine": base.engine,
        "device": base.device,
        "target": str(base.target),
        "servers": ", ".join(f"{name} {spec.head} {spec.drafts} {spec.mode}" for name, spec in specs.items()),
        "threads": str(base.threads),
        "cache": str(base.max_total_tokens),
        "flags": " ".join(base.extra_flags),
        "answers": answers,
        "machine": describe_machine().cpu,
        "versions": ", ".join(f"{name} {version}" for name, version in versions(base.engine).items()),
        **more,
    }


@dataclass(frozen=True)
class Ran(Generic[Name]):
    """Servers that were measured, and what was seen of them and of the machine."""

    servers: dict[Name, Server]
    version: str
    busy: float
    watch: StealWatch


@dataclass(frozen=True)
class CellRun(Generic[One]):
    """One run of a benchmark, with what it has measured until now."""

    plan: Plan
    questions: Mapping[str, Sequence[Question]]
    measured: Measured[One]
    path: Path  # of the report
    logs: Path
    steps: Steps

    def is_missing(self, names: Iterable[str]) -> bool:
        """Whether any measurement of these servers was not made."""
        known = {(one.repeat, one.cell, one.server) for one in self.measured.measurements}
        wanted = {(repeat, cell, name) for repeat, _, cell in self.plan.turns() for name in names}
        return not wanted <= known

    @contextlib.contextmanager
    def measure(
        self, specs: Mapping[Name, ServerSpec], make: Callable[[Name, dict[str, Any]], One]
    ) -> Iterator[Ran[Name]]:
        """Start these servers and add what is missing; they are stopped at the end of the block.

        make: the measurement of a server, from its name and the fields that all benchmarks have.
        """
        plan, steps = self.plan, self.steps
        with serving(specs, self.logs, steps) as servers:
            shortest = min(self.questions.values(), key=lambda questions: len(questions[0].prompt))
            temperatures = sorted({cell.temperature for cell in plan.repeats})
            warm_up_under_load(servers, shortest, plan.max_concurrency, temperatures, steps)
            version, busy = version_of(next(iter(servers.values()))), check_busy(steps)
            watch = measure_cells(servers, plan, self.questions, self.measured, make, partial_path(self.path), steps)
            yield Ran(servers, version, busy, watch)

    def finish(
        self,
        report: BaseModel,
        tables: Sequence[RenderableType],
        lines: Sequence[str],
        draw_picture: Callable[[Any, Path], None] | None = None,
    ) -> None:
        """Write the report and its picture, and print the tables and lines."""
        save(report, self.path)
        partial_path(self.path).unlink(missing_ok=True)
        for table in tables:
            self.steps.console.print(table)
        for line in lines:
            self.steps.log(escape(line))
        if draw_picture:
            draw(report, draw_picture, self.path, self.steps)


def begin_run(
    plan: Plan,
    questions: Mapping[str, Sequence[Question]],
    identity: dict[str, str],
    kind: type[Measured[One]],
    path: Path,
    logs: Path,
    steps: Steps,
    resume: bool,
) -> CellRun[One]:
    """A run; with `resume`, what an interrupted one measured is kept. ValueError if that had another identity."""
    partial = partial_path(path)
    measured = resume_from(partial, identity, kind) if resume else kind(identity=identity)
    save(measured, partial)  # now, and not after the servers have started, if the folder cannot be written
    return CellRun(plan, questions, measured, path, logs, steps)
