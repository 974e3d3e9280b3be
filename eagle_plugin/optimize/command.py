"""`eagle-plugin optimize`: one recipe, from prompts to a trained head with its measured gain; it can be resumed."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from eagle_plugin.atomic_io import write_output
from eagle_plugin.bench.choices import default_engine, resolve_target
from eagle_plugin.bench.servers import Server, ServerError, ServerSpec, sigterm_as_exit
from eagle_plugin.models.shipped import recipe_file
from eagle_plugin.optimize.recipe import JobError, JobRecipe, read_job
from eagle_plugin.optimize.stages import Stage, data_stages, head_stages

EPILOG = """\
examples:
  eagle-plugin optimize smollm2-135m-instruct --out out/head            the recipe that comes with eagle-plugin
  eagle-plugin optimize RECIPE.yaml --out out/head --until features     stop before training
  eagle-plugin optimize RECIPE.yaml --out out/head                      the same command resumes after a kill
  eagle-plugin optimize smollm2-135m-instruct-peagle --data out/head --out out/peagle --minutes 10

The folder --out has everything: prompts.jsonl, generated.jsonl, recorded.jsonl, vocabulary.safetensors, features/,
train/NAME/ for each training run, check.json and eval.json. The trained head is OUT/head. With --data the files of the
first stages, up to features/, are in that folder; another job with the same recipe for them uses them again.
"""
JOB_FILE = "job.json"  # in each folder: which stages of it are done


def run(job: JobRecipe, target: Path, options: argparse.Namespace, console: Console) -> None:
    """Run the stages that are not done yet; a stage that was stopped resumes.

    Raises:
        JobError: a stage failed; its own message was printed before.
    """
    out, until = options.out, options.until
    data = out if options.data is None else options.data
    homes = [(data, stage) for stage in data_stages(job, target, data)]
    homes += [(out, stage) for stage in head_stages(job, target, out, data, options.minutes)]
    stages = [stage for _, stage in homes]
    if until is not None and not any(stage.name.startswith(until) for stage in stages):
        names = ", ".join(stage.name for stage in stages)
        raise JobError(f"--until {until} is no stage of this recipe, wanted the beginning of one of: {names}")
    for option, folder in (("--data", data), ("--out", out)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"cannot make the folder {folder} ({error.strerror})"
            raise JobError(f"{what}; name another one with {option}") from error
    records = {folder: _read_done(folder / JOB_FILE) for folder in (data, out)}
    digest = ""
    for number, (home, stage) in enumerate(homes, 1):
        done = records[home]
        title = f"{number}/{len(stages)} {stage.name}"
        digest = hashlib.sha256(json.dumps([digest, stage.args, stage.recipe]).encode()).hexdigest()
        if done.get(stage.name) == digest and stage.output.exists():
            console.print(f"{title}: done before", highlight=False)
        else:
            console.print(f"[bold]{title}[/]", highlight=False)
            if stage.recipe:
                write_output(Path(stage.args[1]), [stage.recipe])
            with _endpoint(stage, job, target, home, console) as extra:
                _call([*stage.args, *extra], stage.name)
            done[stage.name] = digest
            write_output(home / JOB_FILE, [json.dumps(done, indent=2), "\n"])
        if until is not None and stage.name.startswith(until):
            return
    _link_head(out, list(job.train)[-1])


@contextlib.contextmanager
def _endpoint(stage: Stage, job: JobRecipe, target: Path, out: Path, console: Console) -> Iterator[list[str]]:
    """The arguments that name an endpoint: none, or those of a stock engine that runs as long as the stage does."""
    if not stage.needs_server:
        yield []
        return
    spec = ServerSpec(target=target, mode="plain", engine=default_engine()).for_concurrency(job.generate.concurrency)
    with sigterm_as_exit(), Server.of(spec, out / "logs") as server:
        console.print("starting the engine", highlight=False)
        server.wait_ready()
        yield ["--endpoint", server.url]


def _call(args: Sequence[str], name: str) -> None:
    """Run one sub-command in a process of its own, so that its memory is freed."""
    code = subprocess.run([sys.executable, "-m", "eagle_plugin.cli", *args], check=False).returncode
    if code == 130:
        raise KeyboardInterrupt
    if code != 0:
        raise JobError(f"the stage '{name}' ended with exit code {code}; see its message above, then run the job again")


def _read_done(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise JobError(f"{path} is not the record of a job ({error}); delete it to run every stage again") from error


def _link_head(out: Path, last: str) -> None:
    link = out / "head"
    part = out / "head.part"
    part.unlink(missing_ok=True)
    part.symlink_to(Path("train") / last / "head")
    os.replace(part, link)


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes above 0")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job; returns 0, raises UserError for anything refused."""
    parser = argparse.ArgumentParser(
        prog="eagle-plugin optimize",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe, as in the examples"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for everything that the job makes"
    )
    parser.add_argument("--until", metavar="STAGE", help="stop after the stage whose name starts with STAGE")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder for prompts, answers and features (--out)")
    parser.add_argument(
        "--minutes", type=_minutes, metavar="M", help="train for M minutes in all, not for the recipe's budget"
    )
    options = parser.parse_args(argv)
    console = Console(stderr=True)
    job = read_job(recipe_file(options.recipe))
    try:
        run(job, resolve_target(job.target, console), options, console)
    except ServerError as error:
        raise JobError(str(error)) from error
    console.print(f"the trained head is {options.out / 'head'}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
