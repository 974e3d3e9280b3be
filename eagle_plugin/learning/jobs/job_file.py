"""The YAML of a job: a recipe with its folders and limits, read with `--set`, or made from a workflow by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from eagle_plugin.common.recipes import did_you_mean, override_key, validate
from eagle_plugin.learning.data.sources.training_sets import TRAINING_SETS
from eagle_plugin.learning.jobs.recipe import JobError, JobRecipe
from eagle_plugin.learning.jobs.stages import list_stages
from eagle_plugin.models.shipped import head_folder

# Of a run on a CPU, and on a GPU, where servers draft 7 deep (`policy.shapes.GPU_DEPTH`): share of the budget, steps.
CPU_PHASES = ((0.4, 2), (0.6, 4))
GPU_PHASES = ((0.3, 2), (0.3, 4), (0.4, 7))
GPU_ANSWER = 2048  # tokens of an answer: most end before it, and a head learns nothing of what is cut
NEW_HEAD_LR = 1e-3  # of a head that is not trained yet, where there are less than about 3,000 updates
Minutes = Annotated[float, Field(gt=0, allow_inf_nan=False)]
WORKFLOWS = {
    "scratch-builtin": "a new head, from the built-in prompts or --dataset",
    "scratch-own": "a new head, from your prompts (--prompts)",
    "base-builtin": "train an existing head (--head) further, with the built-in prompts or --dataset",
    "base-own": "train an existing head (--head) further, with your prompts (--prompts)",
    "traffic-builtin": "record what a server with --head answers to built-in questions, and train the head on it",
    "traffic-own": "the same with your questions (--prompts)",
    "own-head": "bring your own head (--head): check and measure only",
}


class JobFile(JobRecipe):
    """A recipe of `optimize`, and where and how long the job runs."""

    out: Path | None = None  # folder of what the job makes; default: JOBS/NAME
    data: Path | None = None  # folder of prompts, answers and features; default: out
    train_minutes: Minutes | None = None  # of training, instead of the budgets in `train`
    limit_minutes: Minutes | None = None  # of all runs of the job together


def workflow_values(
    workflow: str,
    target: str | None,
    head: str | None,
    prompts: Sequence[str],
    datasets: Sequence[str],
    on_gpu: bool = False,
) -> dict[str, Any]:
    """The keys of a job of this workflow.

    datasets: names of data sets, or NAME=PATH. on_gpu: heads learn the depth of a GPU's trees, from whole answers.

    Raises:
        JobError: an option is missing, or is not for this workflow.
    """
    if workflow not in WORKFLOWS:
        hint = did_you_mean(workflow, WORKFLOWS)
        raise JobError(f"--workflow {workflow} is unknown, wanted one of {', '.join(WORKFLOWS)}{hint}")
    start, _, source = workflow.partition("-")
    needed = {"--target": (target, True), "--head": (head, start != "scratch"), "--prompts": (prompts, source == "own")}
    for option, (value, wanted) in needed.items():
        if bool(value) != wanted:
            raise JobError(f"--workflow {workflow} {'needs' if wanted else 'takes no'} {option}; {WORKFLOWS[workflow]}")
    if datasets and (source != "builtin" or start == "traffic"):
        raise JobError(f"--workflow {workflow} takes no --dataset; {WORKFLOWS[workflow]}")
    if workflow == "own-head":
        return {"target": target, "head": head}
    if start == "traffic":
        return _traffic_values(str(target), str(head), prompts, workflow, on_gpu)
    sets = [_data_set(text) for text in datasets]
    source_keys = {"files": list(prompts)} if prompts else {"sets": sets} if sets else {"builtin": 6000}
    shape = {"from": head} if start == "base" else {}
    run: dict[str, Any] = {"head": shape, "budget": {"epochs": 3}, "phases": _phases(on_gpu)}
    if start == "scratch" and not sets:  # which have up to 200,000 dialogues
        run["optimiser"] = {"lr": NEW_HEAD_LR}
    values: dict[str, Any] = {"target": target, "prompts": source_keys, "train": {"head": run}}
    values |= {"generate": {"max_tokens": GPU_ANSWER}} if on_gpu else {}
    return values | ({"compare": head} if start == "base" else {"vocabulary": 32000})


def _phases(on_gpu: bool) -> list[dict[str, Any]]:
    return [{"share": share, "steps": steps} for share, steps in (GPU_PHASES if on_gpu else CPU_PHASES)]


def _traffic_values(target: str, head: str, prompts: Sequence[str], workflow: str, on_gpu: bool) -> dict[str, Any]:
    if len(prompts) > 1:
        raise JobError(f"--workflow {workflow} takes one file of --prompts, found {len(prompts)}; join them")
    run = {
        "head": {"from": head},
        "budget": {"epochs": 8},
        "batch_tokens": 2048,
        "phases": _phases(on_gpu),
        "optimiser": {"name": "adamw", "lr": 1e-3, "clip": 1.0, "schedule": "linear", "warm_up": 0.05},
        "loss": {"teacher": "draft"},
        "eval_every": 50,
        "eval_tokens": 4000,
        "checkpoint_every": 25,
    }
    return {
        "target": target,
        "compare": head,
        "traffic": {"prompts": prompts[0]} if prompts else {},
        "train": {"head": run},
        "evaluate": [],
        "benchmark": {"concurrency": [1, 4, 8], "repeats": 3},
        "package": False,
        "exchange": {},
    }


def _data_set(text: str) -> dict[str, Any]:
    name, sign, path = text.partition("=")
    if name not in TRAINING_SETS:
        hint = did_you_mean(name, TRAINING_SETS)
        raise JobError(f"--dataset {name} is unknown, wanted one of {', '.join(TRAINING_SETS)}{hint}")
    return {"name": name, "path": path} if sign else {"name": name}


def parse_job(values: dict[str, Any], overrides: Sequence[str], where: str) -> JobFile:
    """The job of these keys, with `a.b=value` over them.

    Raises:
        JobError: a key is wrong.
    """
    for override in overrides:
        override_key(values, override, JobError)
    return validate(JobFile, values, where, JobError)


def check_job(values: dict[str, Any], overrides: Sequence[str], where: str) -> JobFile:
    """As `parse_job`; the stages are planned, so that no later one is refused.

    Raises:
        JobError, TrainError: a key is wrong, or a file that the job reads is missing.
    """
    job = parse_job(values, overrides, where)
    for _ in list_stages(job, Path(job.target), Path("out"), minutes=job.train_minutes):
        pass
    reads = [("prompts.files", path) for path in job.prompts.files]
    reads += [("prompts.sets", wanted.path) for wanted in job.prompts.sets if wanted.path is not None]
    reads += [("traffic.prompts", job.traffic.prompts)] if job.traffic and job.traffic.prompts else []
    for key, path in reads:
        if not path.exists():
            raise JobError(f"{where}: {key} names {path}, which does not exist; correct the path")
    return job


def dump_job(values: dict[str, Any]) -> str:
    """The YAML of a job. Paths become absolute, so that it can be resumed from any folder."""
    values = dict(values)
    for key in ("out", "data"):
        if values.get(key) is not None:
            values[key] = str(Path(values[key]).expanduser().absolute())
    for key in ("target", "head", "compare"):
        if values.get(key) is not None:
            values[key] = _absolute(values[key])
    prompts = dict(values.get("prompts") or {})
    if prompts.get("files"):
        prompts["files"] = [_absolute(path) for path in prompts["files"]]
    if prompts.get("sets"):
        prompts["sets"] = [
            one | ({"path": _absolute(one["path"])} if one.get("path") else {}) for one in prompts["sets"]
        ]
    if prompts:
        values["prompts"] = prompts
    for key in ("benchmark", "traffic"):
        section = values.get(key)
        if isinstance(section, dict) and section.get("prompts"):
            values[key] = section | {"prompts": _absolute(section["prompts"])}
    runs = {}
    for name, run in (values.get("train") or {}).items():
        shape = run.get("head") or {}
        runs[name] = run | ({"head": shape | {"from": _absolute(shape["from"])}} if shape.get("from") else {})
    return yaml.safe_dump(values | ({"train": runs} if runs else {}), sort_keys=False)


def _absolute(name: Any) -> str:
    """A path that is there as an absolute one; the name of a model or of a shipped head stays a name."""
    path = Path(str(name)).expanduser()
    return str(path.absolute()) if path.exists() and head_folder(path) == path else str(name)
