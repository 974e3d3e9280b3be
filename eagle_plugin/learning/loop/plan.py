"""The steps of the loop in their order: most are sub-commands of eagle-plugin, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from eagle_plugin.bench.progress import Steps
from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.learning.jobs.stage_process import call
from eagle_plugin.learning.jobs.watch import Watch
from eagle_plugin.learning.loop.prompts import write_held_out_rows, write_prompts
from eagle_plugin.learning.loop.settings import LoopSettings
from eagle_plugin.learning.loop.steps import Step
from eagle_plugin.learning.loop.swap import swap_head
from eagle_plugin.learning.loop.traffic import read_questions, record_traffic
from eagle_plugin.learning.loop.training import write_recipe

Call = Callable[[str, list[str]], None]  # (name of the step, arguments of `eagle-plugin`)


def plan_steps(
    settings: LoopSettings,
    target: Path,
    head: Path,
    out: Path,
    folder: Path,
    steps: Steps,
    *,
    swap: bool = True,
    command: Call | None = None,
) -> list[Step]:
    """All steps of the loop.

    Args:
        target, head: folders of the target and of the head that is trained further.
        out: folder of the report. folder: of everything else that the steps make.
        swap: whether a server's head is exchanged.
        command: runs a sub-command; None: `eagle-plugin` in a process of its own.
    """
    run = _Commands(folder, steps) if command is None else command
    prompts, measured, held_rows = folder / "prompts.jsonl", folder / "held-out.jsonl", folder / "held-out-rows.jsonl"
    traffic, prepared, rows = folder / "traffic.jsonl", folder / "prepared.jsonl", folder / "rows.jsonl"
    store, trained, recipe = folder / "features", folder / "train/head", folder / "train.yaml"
    bench, accept, stored = folder / "benchmark", folder / "accept-details.json", folder / "features.done"

    def make_prompts() -> None:
        write_prompts(settings.prompts, settings.count, settings.held_out, prompts, measured)

    def train() -> None:
        write_recipe(settings, target, head, rows, store, recipe)
        run("train", ["train", str(recipe), "--out", str(folder / "train")])

    def features() -> None:
        run("features", ["data", "features", str(rows), "--target", str(target), "--store", str(store)])
        write_output(stored, ["all rows are in the store\n"])  # its manifest is there from the first shard on

    def evaluate() -> None:
        write_held_out_rows(measured, target, held_rows)
        args = ["eval", str(target), str(head), str(trained), "--rows", str(held_rows)]
        args += ["--prompts", str(settings.held_out), "--tokens", str(settings.eval_tokens), "--temperatures", "0"]
        run("accept length", [*args, "--json", str(folder / "accept.json")])

    def benchmark() -> None:
        args = ["benchmark", str(target), "--head", str(trained), "--base-head", str(head), "--prompts", str(measured)]
        args += ["--sets", "--concurrency", *map(str, settings.concurrency), "--engine", settings.engine]
        args += ["--repeats", str(settings.repeats), "--max-tokens", str(settings.bench_tokens)]
        run("benchmark", [*args, "--out", str(bench), *_resume(bench)])

    def exchange() -> None:
        swap_head(settings, target, head, trained, read_questions(measured), folder, steps)

    def page() -> None:
        curve = folder / "train/logs/curve.json"
        found = ["--curve", str(curve)] if curve.exists() else []
        run("report", ["report", str(bench), *found, "--eval", str(accept), "--out", str(out)])

    def simple(name: str, *args: str | Path) -> Callable[[], None]:
        return lambda: run(name, [*map(str, args)])

    plan = [
        Step("prompts", prompts, 2, make_prompts),
        Step("traffic", folder / "traffic.json", 330,
             lambda: record_traffic(settings, target, head, prompts, folder, steps)),
        Step("export", traffic, 3, simple("export", "capture", "export", folder / "capture", "--out", traffic)),
        Step("prepare", prepared, 8,
             simple("prepare", "data", "prepare", traffic, "--keep-responses", "--target", target,
                    "--source", "traffic", "--out", prepared)),
        Step("rows", rows, 8, simple("rows", "data", "render", prepared, "--target", target, "--out", rows)),
        Step("features", stored, 45, features),
        Step("train", trained, 600, train),
        Step("accept length", accept, 60, evaluate),
        Step("benchmark", bench / "states.json", 480, benchmark),
        Step("report", out / "report.html", 10, page),
    ]  # fmt: skip
    if swap:
        plan.append(Step("exchange", folder / "swap.json", 150, exchange))
    return plan


def _resume(bench: Path) -> list[str]:
    """The option that keeps the measurements of a run that was interrupted."""
    return ["--resume"] if any(bench.glob("*.measured.json")) else []


class _Commands:
    """Runs sub-commands with their logs in `folder`/logs; while they run, how far they are is printed."""

    def __init__(self, folder: Path, steps: Steps) -> None:
        self._folder, self._steps = folder, steps

    def __call__(self, name: str, args: list[str]) -> None:
        watch = Watch(self._steps.console)
        watch.begin([name], self._folder / ".progress.json")
        watch.stage(1, name)
        call(args, name, self._folder / "logs" / f"{name.replace(' ', '-')}.log", watch)
        watch.finished(name)
