"""The stages of a job that trains on recorded traffic: those before the training, and those after it.

What is no sub-command of eagle-plugin is a step of `learning/loop`, in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from eagle_plugin.bench.choices import default_engine
from eagle_plugin.learning.jobs.answers import features_of, made_of_answers
from eagle_plugin.learning.jobs.recipe import JobRecipe, TrafficSettings
from eagle_plugin.learning.jobs.stage import Stage
from eagle_plugin.learning.jobs.stage_record import identity_of

STEP = "eagle_plugin.learning.loop.step"
HELD_OUT, HELD_OUT_ROWS, ACCEPT = "held-out.jsonl", "held-out-rows.jsonl", "accept-details.json"


def engine_of(job: JobRecipe) -> str:
    """The engine that serves: of the benchmark, or of this environment."""
    return (job.benchmark.engine if job.benchmark else None) or default_engine()


def step(
    name: str, output: Path, values: dict[str, object], partial: tuple[Path, ...] = (), settings: str | None = None
) -> Stage:
    """A step of `learning/loop`; values: its arguments."""
    args = [name, json.dumps(values, default=str)]
    return Stage(name, args, output, partial=partial, settings=settings, module=STEP)


def traffic_stages(job: JobRecipe, traffic: TrafficSettings, target: Path, data: Path) -> Iterator[Stage]:
    """Choose prompts, and record the answers to them with their hidden states."""
    rows = data / "recorded.jsonl"
    store = features_of(rows)
    chosen: dict[str, object] = {"own": traffic.prompts, "count": traffic.count, "held_out": traffic.held_out}
    yield step("prompts", data / "prompts.jsonl", {"target": target, "folder": data, **chosen})
    asked: dict[str, object] = {
        "engine": engine_of(job),
        "tokens": traffic.max_tokens,
        "concurrency": traffic.concurrency,
    }
    # What a run before this one has recorded stays, if the same was asked of the same.
    settings = json.dumps([identity_of(target), identity_of(job.compare), chosen, asked], default=str)
    values = {"target": target, "head": job.compare, "folder": data, **asked}
    yield step("traffic", store / "manifest.json", values, made_of_answers(rows), settings)


def accept_stages(
    job: JobRecipe, traffic: TrafficSettings, target: Path, out: Path, data: Path, head: Path
) -> Iterator[Stage]:
    """Measure the accept lengths of the base head and the trained head on the held-out prompts, greedily."""
    args = ["eval", str(target), str(job.compare), str(head), "--rows", str(data / HELD_OUT_ROWS)]
    args += ["--prompts", str(traffic.held_out), "--tokens", str(traffic.eval_tokens), "--temperatures", "0"]
    yield Stage("accept length", [*args, "--json", str(out / "accept.json")], out / ACCEPT)


def closing_stages(job: JobRecipe, target: Path, out: Path, data: Path, head: Path) -> Iterator[Stage]:
    """Exchange the head of a running server, and write what the whole loop showed."""
    if job.exchange is not None:
        heads = {"target": target, "base": job.compare, "trained": head, "engine": engine_of(job)}
        asked = {"prompts": data / HELD_OUT, **job.exchange.model_dump()}
        yield step("exchange", out / "swap.json", {"folder": out, **heads, **asked})
    if job.benchmark:
        yield step("summary", out / "loop.json", {"out": out, "data": data, "swap": job.exchange is not None})
