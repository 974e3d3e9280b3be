"""The stages of a job after the training: check, evaluation, benchmark, report and package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from eagle_plugin.bench.states.prompts import SET_NAMES
from eagle_plugin.learning.jobs.recipe import BenchmarkSettings, JobError, JobRecipe
from eagle_plugin.learning.jobs.stage import Stage, check_known
from eagle_plugin.learning.jobs.traffic_stages import ACCEPT, HELD_OUT, accept_stages, closing_stages, engine_of

STATES, PARTIAL_STATES = "states.json", "states.measured.json"


def judge_stages(job: JobRecipe, target: Path, out: Path, data: Path, head: Path) -> Iterator[Stage]:
    """What is done with a head that was trained or brought.

    Raises:
        JobError: a key of the benchmark names a set or a file that is not there.
    """
    if job.evaluate:
        checked, report = out / "check.json", out / "eval.json"
        yield Stage("check", ["check", str(target), str(head), "--json", str(checked)], checked)
        heads = [str(path) for path in (job.compare, head) if path is not None]
        args = ["eval", str(target), *heads, "--sets", *job.evaluate, "--json", str(report)]
        yield Stage("evaluate", args, report)
    if job.traffic is not None:
        yield from accept_stages(job, job.traffic, target, out, data, head)
    if job.benchmark:
        yield _benchmark(job, job.benchmark, target, out, data, head)
        if job.report and job.head is None:
            args = ["report", str(out / "benchmark"), "--out", str(out / "report")]
            if job.traffic is not None:
                args += ["--curve", str(head.parent / "logs/curve.json"), "--eval", str(out / ACCEPT)]
            yield Stage("report", args, out / "report/report.html")
    if job.package:
        package = out / "package"
        args = ["package", str(target), str(head), "--out", str(package), "--engine", engine_of(job)]
        yield Stage("package", [*args, "--measured", str(out)], package / "package.json")
    if job.traffic is not None:
        yield from closing_stages(job, target, out, data, head)


def _benchmark(job: JobRecipe, settings: BenchmarkSettings, target: Path, out: Path, data: Path, head: Path) -> Stage:
    folder = out / "benchmark"
    args = ["benchmark", str(target), "--head", str(head), "--engine", engine_of(job)]
    if (base := job.compare or _parent(job)) is not None:
        args += ["--base-head", str(base)]
    prompts = settings.prompts
    if prompts is not None and not prompts.is_file():
        raise JobError(f"the recipe's benchmark.prompts is {prompts}, which does not exist; correct the path")
    if prompts is None and job.head is None:
        prompts = data / ("prompts.jsonl" if job.traffic is None else HELD_OUT)
    sets = settings.sets
    if sets is None:
        sets = [] if prompts is not None else job.evaluate or list(SET_NAMES[:-1])
    for name in sets:
        check_known("benchmark.sets", name, SET_NAMES)
    if prompts is not None:
        args += ["--prompts", str(prompts)]
    args += ["--sets", *sets, "--concurrency", *map(str, settings.concurrency), "--repeats", str(settings.repeats)]
    args += ["--limit", str(settings.limit), "--max-tokens", str(settings.max_tokens), "--out", str(folder), "--resume"]
    args += ["--aiperf"] if settings.aiperf else []
    return Stage("benchmark", args, folder / STATES, partial=(folder / PARTIAL_STATES,))


def _parent(job: JobRecipe) -> str | None:
    """The head that the first training run starts from."""
    shape = next(iter(job.train.values()), {}).get("head")
    return str(shape["from"]) if isinstance(shape, dict) and shape.get("from") else None
