"""`eagle-plugin optimize`: one recipe, from prompts to a trained head with its measured gain; it can be resumed."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from rich.console import Console

from eagle_plugin.atomic_io import write_output
from eagle_plugin.bench.choices import default_engine, resolve_target
from eagle_plugin.bench.servers import Server, ServerError, ServerSpec, sigterm_as_exit
from eagle_plugin.data.sources.sets import SETS
from eagle_plugin.errors import UserError
from eagle_plugin.models.shipped import head_folder, recipe_file
from eagle_plugin.recipes import did_you_mean, read_yaml, validate
from eagle_plugin.train.recipe import parse_recipe

EPILOG = """\
examples:
  eagle-plugin optimize smollm2-135m-instruct --out out/head            the recipe that comes with eagle-plugin
  eagle-plugin optimize RECIPE.yaml --out out/head --until features     stop before training
  eagle-plugin optimize RECIPE.yaml --out out/head                      the same command resumes after a kill

The folder --out has everything: prompts.jsonl, generated.jsonl, recorded.jsonl, vocabulary.safetensors, features/,
train/NAME/ for each training run, and eval.json. The trained head is OUT/head.
"""
JOB_FILE = "job.json"
Positive = Annotated[int, Field(gt=0)]


class JobError(UserError):
    """A recipe is wrong, or a stage of a job failed."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PromptSettings(_Section):
    """Prompts: files in any format that `data prepare` reads, or the built-in ones."""

    files: list[Path] = []
    builtin: Positive | None = None  # how many built-in prompts
    privacy: str = "drop"  # of files, as in `data prepare`


class GenerateSettings(_Section):
    """Answers of the target: from running endpoints, or from a stock engine that the job starts and stops."""

    endpoints: list[str] = []
    temperatures: list[Annotated[float, Field(ge=0, le=2)]] = []  # default: each prompt's own
    max_tokens: Positive = 192
    concurrency: Positive = 112


class RecordedSettings(_Section):
    """Recorded dialogues of the built-in prompts, which the target reads but did not generate."""

    count: Positive
    max_length: Positive = 512


class JobRecipe(_Section):
    """A whole recipe."""

    target: str
    prompts: PromptSettings
    generate: GenerateSettings = GenerateSettings()
    recorded: RecordedSettings | None = None
    vocabulary: Positive | None = None
    aux_layers: list[Positive] | None = None
    train: dict[str, dict[str, Any]] = Field(min_length=1)  # name -> keys of `eagle-plugin train`, in order
    evaluate: list[str] = ["mtbench", "humaneval", "gsm8k"]  # held-out sets; [] skips the evaluation
    compare: Annotated[Path, AfterValidator(head_folder)] | None = None  # the trained head is measured against this one


class Stage(NamedTuple):
    """One sub-command of the job; it is done when `output` exists and no stage up to this one has changed since."""

    name: str
    args: list[str]
    output: Path
    needs_server: bool = False
    recipe: str = ""  # of a training run: the content of the file that args[1] names


def read_job(path: Path) -> JobRecipe:
    """Read a recipe.

    Raises:
        JobError: naming every wrong key with its value and what was wanted.
    """
    return validate(JobRecipe, read_yaml(path, JobError), str(path), JobError)


def list_stages(job: JobRecipe, target: Path, out: Path) -> list[Stage]:
    """The sub-commands of a job in their order.

    Raises:
        JobError, TrainError: a later stage would fail, perhaps after hours: its part of the recipe is wrong.
    """
    rows = [out / "generated.jsonl"]
    stages = [*_prompt_stages(job, target, out)]
    if job.recorded is not None:
        rows.append(out / "recorded.jsonl")
    if job.vocabulary is not None:
        args = ["data", "vocabulary", *map(str, rows), "--target", str(target), "--size", str(job.vocabulary)]
        stages.append(
            Stage("vocabulary", [*args, "--out", str(out / "vocabulary.safetensors")], out / "vocabulary.safetensors")
        )
    for file in rows:
        store = out / "features" / file.stem
        args = ["data", "features", str(file), "--target", str(target), "--store", str(store)]
        if job.aux_layers is not None:
            args += ["--aux-layers", ",".join(map(str, job.aux_layers))]
        stages.append(Stage(f"features of {file.stem} rows", args, store / "manifest.json"))
    for name in job.evaluate:
        _check_known("evaluate", name, SETS)
    if job.compare is not None and not (job.compare / "config.json").is_file():
        raise JobError(f"the recipe's compare is {job.compare}, which holds no config.json; give the folder of a head")
    head: Path | None = None
    for name, keys in job.train.items():
        folder = out / "train" / name
        args = ["train", f"{folder}.yaml", "--out", str(folder)]
        recipe = _train_recipe(name, keys, job, target, out, head)
        stages.append(Stage(f"train {name}", args, folder / "head", recipe=recipe))
        head = folder / "head"
    heads = [str(path) for path in (job.compare, head) if path is not None]
    if job.evaluate:
        report = out / "eval.json"
        args = ["eval", str(target), *heads, "--sets", *job.evaluate, "--json", str(report)]
        stages.append(Stage("evaluate", args, report))
    return stages


def _prompt_stages(job: JobRecipe, target: Path, out: Path) -> Iterator[Stage]:
    prompts, settings = out / "prompts.jsonl", job.prompts
    if bool(settings.files) == (settings.builtin is not None):
        raise JobError("the recipe's prompts name both files and builtin, or neither; give one of them")
    if settings.builtin is not None:
        args = ["data", "builtin", "--limit", str(settings.builtin), "--out", str(prompts)]
    else:
        args = ["data", "prepare", *map(str, settings.files), "--privacy", settings.privacy, "--out", str(prompts)]
    yield Stage("prompts", args, prompts)
    ask, rows = job.generate, out / "generated.jsonl"
    args = ["data", "generate", str(prompts), "--out", str(rows), "--max-tokens", str(ask.max_tokens)]
    args += ["--concurrency", str(ask.concurrency)]
    if ask.temperatures:
        args += ["--temperature", *map(str, ask.temperatures)]
    for url in ask.endpoints:
        args += ["--endpoint", url]
    yield Stage("answers of the target", args, rows, needs_server=not ask.endpoints)
    if job.recorded is not None:
        dialogues, rows = out / "dialogues.jsonl", out / "recorded.jsonl"
        args = ["data", "builtin", "--recorded", "--limit", str(job.recorded.count), "--out", str(dialogues)]
        yield Stage("recorded dialogues", args, dialogues)
        args = ["data", "render", str(dialogues), "--target", str(target), "--out", str(rows)]
        yield Stage("rendered dialogues", [*args, "--max-length", str(job.recorded.max_length)], rows)


def _check_known(key: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        hint = did_you_mean(str(name), known)
        raise JobError(f"the recipe's {key} names {name!r}, wanted of {', '.join(known)}{hint}; correct it")


def _train_recipe(name: str, keys: dict[str, Any], job: JobRecipe, target: Path, out: Path, head: Path | None) -> str:
    """The recipe of one training run; all but the first start from the head before them, with its draft vocabulary."""
    for part in ("head", "data"):
        if not isinstance(keys.get(part, {}), dict):
            raise JobError(f"the recipe's train.{name}.{part} is {keys[part]!r}, wanted a mapping of keys; correct it")
    shape = dict(keys.get("head", {}))
    if head is not None:
        shape["from"] = str(head)
    elif job.vocabulary is not None:
        shape["vocabulary"] = str(out / "vocabulary.safetensors")
    stores = keys.get("data", {}).get("store", ["generated"])
    stores = stores if isinstance(stores, list) else [stores]
    for store in stores:
        _check_known(f"train.{name}.data.store", store, ["generated"] + ["recorded"] * (job.recorded is not None))
    data = {"store": [str(out / "features" / store) for store in stores]}
    values = {**keys, "target": str(target), "head": shape, "data": data}
    parse_recipe(values, f"the recipe's train.{name}")
    return yaml.safe_dump(values, sort_keys=False)


def run(job: JobRecipe, target: Path, out: Path, until: str | None, console: Console) -> None:
    """Run the stages that are not done yet; a stage that was stopped resumes.

    Raises:
        JobError: a stage failed; its own message was printed before.
    """
    stages = list_stages(job, target, out)
    if until is not None and not any(stage.name.startswith(until) for stage in stages):
        names = ", ".join(stage.name for stage in stages)
        raise JobError(f"--until {until} is no stage of this recipe, wanted the beginning of one of: {names}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"cannot make the folder {out} ({error.strerror}); name another one with --out") from error
    done = _read_done(out / JOB_FILE)
    digest = ""
    for number, stage in enumerate(stages, 1):
        title = f"{number}/{len(stages)} {stage.name}"
        digest = hashlib.sha256(json.dumps([digest, stage.args, stage.recipe]).encode()).hexdigest()
        if done.get(stage.name) == digest and stage.output.exists():
            console.print(f"{title}: done before", highlight=False)
        else:
            console.print(f"[bold]{title}[/]", highlight=False)
            if stage.recipe:
                write_output(Path(stage.args[1]), [stage.recipe])
            with _endpoint(stage, job, target, out, console) as extra:
                _call([*stage.args, *extra], stage.name)
            done[stage.name] = digest
            write_output(out / JOB_FILE, [json.dumps(done, indent=2), "\n"])
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job; returns 0, raises UserError for anything refused."""
    parser = argparse.ArgumentParser(
        prog="eagle-plugin optimize",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a YAML file, or the shipped recipe's name: smollm2-135m-instruct"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for everything that the job makes"
    )
    parser.add_argument("--until", metavar="STAGE", help="stop after the stage whose name starts with STAGE")
    options = parser.parse_args(argv)
    console = Console(stderr=True)
    job = read_job(recipe_file(options.recipe))
    try:
        run(job, resolve_target(job.target, console), options.out, options.until, console)
    except ServerError as error:
        raise JobError(str(error)) from error
    console.print(f"the trained head is {options.out / 'head'}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
