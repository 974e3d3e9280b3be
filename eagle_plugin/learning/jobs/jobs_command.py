"""`eagle-plugin optimize create | list | describe | stop | resume | estimate`: jobs in a folder, which any machine can
follow, and what one will take."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone

from rich.console import Console

from eagle_plugin.common.command_line import Parser
from eagle_plugin.learning.jobs.estimate_command import EPILOG as ESTIMATE_EPILOG
from eagle_plugin.learning.jobs.estimate_command import add_estimate_options, run_estimate
from eagle_plugin.learning.jobs.job import JOBS, Job
from eagle_plugin.learning.jobs.job_file import WORKFLOWS
from eagle_plugin.learning.jobs.jobs_folder import JobsFolder, Status
from eagle_plugin.learning.jobs.recipe import JobError
from eagle_plugin.learning.jobs.stage_process import INTERRUPTED
from eagle_plugin.learning.jobs.watch import Progress

EPILOG = """\
workflows:
{workflows}

examples:
  eagle-plugin optimize create small --workflow base-builtin --target smollm2-135m-instruct \\
      --head smollm2-135m-instruct-eagle3 --set prompts.builtin=500 --set limit_minutes=120
  eagle-plugin optimize create mine --recipe RECIPE.yaml --set vocabulary=8192 --no-start
  eagle-plugin optimize list --jobs s3://bucket/jobs
  eagle-plugin optimize describe small
  eagle-plugin optimize stop small          from any machine: the job ends after its current step
  eagle-plugin optimize resume small        continues after a stop, a kill, an error or a power cut

JOBS is a folder, a file:// URL, or an s3://, gs:// or az:// URL; there a job must say where its files are, with
--set out=DIR. Every key of a job can be set: docs/jobs.md
"""


def run_action(argv: Sequence[str]) -> int:
    """Run one of ACTIONS; returns the exit code: 0, or 130 for a job that was stopped.

    Raises:
        UserError: anything refused, and a stage that failed.
    """
    arguments = _parser().parse_args(argv)
    return ACTIONS[arguments.action](arguments)


def _create(arguments: argparse.Namespace) -> int:
    job = Job.create(
        arguments.name,
        jobs=arguments.jobs,
        workflow=arguments.workflow,
        recipe=arguments.recipe,
        target=arguments.target,
        head=arguments.head,
        prompts=arguments.prompts,
        dataset=arguments.dataset,
        settings=arguments.set,
    )
    console = Console(stderr=True)
    console.print(f"created the job {job.name} in {JobsFolder(arguments.jobs).folder.url}", highlight=False)
    return 0 if arguments.no_start else _run(job, arguments, console)


def _resume(arguments: argparse.Namespace) -> int:
    job = Job(arguments.name, arguments.jobs)
    if arguments.set:
        job.change(arguments.set)
    return _run(job, arguments, Console(stderr=True))


def _run(job: Job, arguments: argparse.Namespace, console: Console) -> int:
    """Run a job until it is finished or stopped, and say what became of it; or give it to a cluster."""
    if arguments.ray:
        job.submit(arguments.ray, arguments.cpus, arguments.gpus)
        console.print(f"the cluster has it; `optimize describe {job.name}` follows it", highlight=False)
        return 0
    status = job.run(console)
    if status.state == "stopped":
        console.print(f"stopped: {status.message}; `optimize resume {job.name}` continues", highlight=False)
        return INTERRUPTED
    made = f"the trained head is {job.head}" if job.settings.train else f"the measurements are in {job.folder}"
    console.print(made, highlight=False)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    found = Job.list(arguments.jobs)
    if arguments.json:
        print(json.dumps({name: _as_json(status) for name, status in found.items()}, indent=1))
        return 0
    width = max(map(len, found), default=0)
    for name, status in found.items():
        print(f"{name:<{width}}  {status.shown:<11}  {_stage(status)}".rstrip())
    if not found:
        print(f"no job in {JobsFolder(arguments.jobs).folder.url}")
    return 0


def _describe(arguments: argparse.Namespace) -> int:
    job = Job(arguments.name, arguments.jobs)
    keys, status = job.settings, job.describe()
    if arguments.json:
        print(json.dumps(_as_json(status), indent=1))
        return 0
    out = keys.out or JobsFolder(arguments.jobs).work_folder(job.name)
    rows = [("job", job.name), ("state", status.shown), ("stage", _stage(status)), ("progress", _progress(status))]
    try:
        if (cluster := job.on_cluster()) is not None:
            rows += [("cluster", f"{cluster[1]} on {cluster[0]}. {cluster[2]}".rstrip(". "))]
    except JobError as error:  # the rest is known without it
        rows += [("cluster", str(error))]
    rows += [("message", status.message), ("target", keys.target), ("folder", str(out or "")), ("host", status.host)]
    if status.started:
        rows += [("started", _time(status.started)), ("heard of", f"{_time(status.heartbeat)}{_ago(status)}")]
        rows += [("running time", str(timedelta(seconds=round(status.spent_s))))]
    rows += [("done", f"{one.name} ({one.seconds:,.1f} s)") for one in status.times]
    for key, value in rows:
        if value:
            print(f"{key:<13} {value}")
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    job = Job(arguments.name, arguments.jobs)
    host = job.describe().host or "its cluster"
    job.stop()
    print(
        f"asked the job {job.name} on {host} to stop after its current step; `optimize describe {job.name}` follows it"
    )
    return 0


def _stage(status: Status) -> str:
    return f"{status.number}/{len(status.stages)} {status.stage}" if status.number else ""


def _progress(status: Status) -> str:
    if status.done is None:
        return ""
    return str(Progress(status.done, status.total, status.unit, status.rate, status.seconds_left))


def _as_json(status: Status) -> dict[str, object]:
    return status.model_dump(mode="json") | {"shown": status.shown}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _ago(status: Status) -> str:
    return f" ({max(0.0, time.time() - status.heartbeat):,.0f} s ago)" if status.alive else ""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="eagle-plugin optimize",
        description="Jobs in a folder: create, list, describe, stop and resume them, and estimate what one takes.",
        epilog=_epilog(),
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = {
        "create": "write a new job, and run it",
        "list": "all jobs with their states",
        "describe": "one job: state, stage, progress, times",
        "stop": "ask a running job to end after its current step",
        "resume": "run a job that is not finished, or again what changed",
    }
    for name, help_text in text.items():
        action = actions.add_parser(name, help=help_text, epilog=_epilog())
        if name != "list":
            action.add_argument("name", metavar="NAME", help="the job")
        action.add_argument("--jobs", default=JOBS, metavar="JOBS", help=f"folder or URL of the jobs ({JOBS})")
        if name in ("list", "describe"):
            action.add_argument("--json", action="store_true", help="print all of the status as JSON")
        if name in ("create", "resume"):
            action.add_argument(
                "--set", action="append", default=[], metavar="KEY=VALUE", help="set one key of the job, as in a.b=1"
            )
            action.add_argument("--ray", metavar="ADDRESS", help="let a Ray cluster run it: http://HOST:8265")
            action.add_argument("--cpus", type=float, default=1, help="cores that it needs there (default: 1)")
            action.add_argument("--gpus", type=float, default=0, help="GPUs that it needs there (default: none)")
        if name == "create":
            action.add_argument("--workflow", metavar="W", help=", ".join(WORKFLOWS))
            action.add_argument("--recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
            action.add_argument("--target", metavar="T", help="a folder, or a name of `models list`")
            action.add_argument("--head", metavar="H", help="an existing head: a folder, or the name of a shipped one")
            action.add_argument("--prompts", nargs="+", default=[], metavar="FILE", help="files of `data prepare`")
            action.add_argument(
                "--dataset",
                nargs="+",
                default=[],
                metavar="NAME[=PATH]",
                help="data sets of `data set`, from a local copy if PATH is given",
            )
            action.add_argument("--no-start", action="store_true", help="only write the job; `resume` runs it")
    help_text = "what a job will take: bytes, memory, hours"
    add_estimate_options(actions.add_parser("estimate", help=help_text, epilog=ESTIMATE_EPILOG))
    return parser


def _epilog() -> str:
    return EPILOG.format(workflows="\n".join(f"  {name:<16} {text}" for name, text in WORKFLOWS.items()))


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "create": _create,
    "list": _list,
    "describe": _describe,
    "stop": _stop,
    "resume": _resume,
    "estimate": run_estimate,
}
