"""The stages of a job: which sub-command makes which file, in which order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from eagle_plugin.learning.data.sources.builtin_prompts import SHAREGPT
from eagle_plugin.learning.data.sources.sets import SETS
from eagle_plugin.learning.data.sources.training_sets import TRAINING_SETS
from eagle_plugin.learning.jobs.answers import features_of, made_of_answers
from eagle_plugin.learning.jobs.judge_stages import judge_stages
from eagle_plugin.learning.jobs.recipe import JobError, JobRecipe
from eagle_plugin.learning.jobs.stage import Stage, check_known, terms_options
from eagle_plugin.learning.jobs.stage_record import identity_of
from eagle_plugin.learning.jobs.traffic_stages import traffic_stages
from eagle_plugin.learning.train.recipe import parse_recipe

VOCABULARY = "vocabulary.safetensors"


def list_stages(
    job: JobRecipe, target: Path, out: Path, data: Path | None = None, minutes: float | None = None
) -> list[Stage]:
    """The sub-commands of a job in their order: those of `data_stages`, then those of `head_stages`.

    data: the folder of prompts, answers and features (None: out). minutes: of training, instead of the recipe's budget.

    Raises:
        JobError, TrainError: a later stage would fail, perhaps after hours: its part of the recipe is wrong.
    """
    data = out if data is None else data
    return [*data_stages(job, target, data), *head_stages(job, target, out, data, minutes)]


def data_stages(job: JobRecipe, target: Path, data: Path) -> Iterator[Stage]:
    """From prompts to features, all in the folder `data`; none for a head that exists."""
    if job.head is not None:
        return
    if job.traffic is None:
        yield from _prompt_stages(job, target, data)
    else:
        yield from traffic_stages(job, job.traffic, target, data)
    rows = [data / f"{name}.jsonl" for name in _stores(job)]
    if job.vocabulary is not None:
        out = data / VOCABULARY
        args = ["data", "vocabulary", *map(str, rows), "--target", str(target), "--size", str(job.vocabulary)]
        yield Stage("vocabulary", [*args, "--out", str(out)], out)
    for file in rows if job.traffic is None and job.online is None else ():  # else servers compute them
        store = features_of(file)
        args = ["data", "features", str(file), "--target", str(target), "--store", str(store)]
        if job.aux_layers is not None:
            args += ["--aux-layers", ",".join(map(str, job.aux_layers))]
        if job.states != "bfloat16":
            args += ["--states", job.states]
        yield Stage(f"features of {file.stem} rows", args, store / "manifest.json")


def head_stages(job: JobRecipe, target: Path, out: Path, data: Path, minutes: float | None) -> Iterator[Stage]:
    """Training and what is done with the head, all in the folder `out`."""
    for name in job.evaluate:
        check_known("evaluate", name, SETS)
    if job.compare is not None and not (job.compare / "config.json").is_file():
        raise JobError(f"the recipe's compare is {job.compare}, which holds no config.json; give the folder of a head")
    budget = None if minutes is None else {"minutes": minutes / len(job.train)}
    head: Path | None = job.head
    if head is not None and not (head / "config.json").is_file():
        raise JobError(f"the recipe's head is {head}, which holds no config.json; give the folder of a head")
    for name, keys in job.train.items():
        folder = out / "train" / name
        args = ["train", f"{folder}.yaml", "--out", str(folder), *terms_options(job)]
        recipe = _train_recipe(name, keys | ({"budget": budget} if budget else {}), job, target, data, head)
        yield Stage(f"train {name}", args, folder / "head", recipe=recipe)
        head = folder / "head"
    if head is not None:
        yield from judge_stages(job, target, out, data, head)


def _stores(job: JobRecipe) -> list[str]:
    """The names of the files of token rows, and of their feature stores."""
    if job.traffic is not None:
        return ["recorded"]
    return ["generated"] if job.recorded is None else ["generated", "recorded"]


def _prompt_stages(job: JobRecipe, target: Path, data: Path) -> Iterator[Stage]:
    prompts, settings = data / "prompts.jsonl", job.prompts
    files = [*map(str, settings.files)]
    if bool(files or settings.sets) == (settings.builtin is not None):
        raise JobError("the recipe's prompts name both files and builtin, or neither; give one of them")
    if settings.skip and settings.builtin is None:
        raise JobError(
            f"the recipe's prompts.skip is {settings.skip}, and only built-in prompts can be left out; delete it"
        )
    for wanted in settings.sets:
        made = data / "sets" / f"{wanted.name}.jsonl"
        args = ["data", "set", wanted.name, "--out", str(made)]
        for key in ("path", "revision", "sha256", "license", "limit"):
            if (value := getattr(wanted, key)) is not None:
                args += [f"--{key}", str(value)]
        check_known("prompts.sets", wanted.name, TRAINING_SETS)
        if TRAINING_SETS[wanted.name].forbids == "all":
            _check_accepted(job, wanted.name)
        yield Stage(f"data set {wanted.name}", args, made)
        files.append(str(made))
    if settings.builtin is not None:
        args = ["data", "builtin", *_count(settings.builtin, settings.skip), "--out", str(prompts)]
    else:
        args = ["data", "prepare", *files, "--privacy", settings.privacy, "--out", str(prompts)]
        args += ["--license", settings.license] if settings.license is not None else []
        args += ["--forbids-training"] if settings.forbids_training else []
    yield Stage("prompts", [*args, *terms_options(job)], prompts)
    ask, rows = job.generate, data / "generated.jsonl"
    args = ["data", "generate", str(prompts), "--out", str(rows), "--max-tokens", str(ask.max_tokens)]
    args += ["--concurrency", str(ask.concurrency)]
    args += ["--timeout", str(ask.timeout)] if ask.timeout is not None else []
    if ask.temperatures:
        args += ["--temperature", *map(str, ask.temperatures)]
    endpoints = ask.endpoints or (job.online.servers if job.online else [])
    for url in endpoints:
        args += ["--endpoint", url]
    yield Stage(
        "answers of the target",
        args,
        rows,
        needs_server=not endpoints,
        partial=made_of_answers(rows),
        settings=json.dumps([ask.max_tokens, ask.temperatures, identity_of(target)]),
        prompts=prompts,
    )
    if job.recorded is not None:
        _check_accepted(job, SHAREGPT.name)
        dialogues, rows = data / "dialogues.jsonl", data / "recorded.jsonl"
        count = _count(job.recorded.count, job.recorded.skip)
        args = ["data", "builtin", "--recorded", *count, "--out", str(dialogues)]
        yield Stage("recorded dialogues", [*args, *terms_options(job)], dialogues)
        args = ["data", "render", str(dialogues), "--target", str(target), "--out", str(rows)]
        yield Stage("rendered dialogues", [*args, "--max-length", str(job.recorded.max_length)], rows)


def _check_accepted(job: JobRecipe, name: str) -> None:
    """Raise JobError, before anything is downloaded, where a later stage would refuse the terms of a source."""
    if name not in job.accept_terms:
        raise JobError(
            f"the terms of the source {name} forbid to train other models on what the recipe takes of it; leave it "
            f"out, or say that you may with accept_terms: [{name}]"
        )


def _count(limit: int, skip: int) -> list[str]:
    """Options of `data builtin`; without --skip where it leaves out none, as in jobs that began before the option."""
    return ["--limit", str(limit), *(["--skip", str(skip)] if skip else [])]


def _train_recipe(name: str, keys: dict[str, Any], job: JobRecipe, target: Path, data: Path, head: Path | None) -> str:
    """The recipe of one training run; all but the first start from the head before them, with its draft vocabulary."""
    for part in ("head", "data"):
        if not isinstance(keys.get(part, {}), dict):
            raise JobError(f"the recipe's train.{name}.{part} is {keys[part]!r}, wanted a mapping of keys; correct it")
    shape = dict(keys.get("head", {}))
    if head is not None:
        shape["from"] = str(head)
    elif job.vocabulary is not None:
        shape["vocabulary"] = str(data / VOCABULARY)
    stores = keys.get("data", {}).get("store", _stores(job)[:1])
    stores = stores if isinstance(stores, list) else [stores]
    for store in stores:
        check_known(f"train.{name}.data.store", store, _stores(job))
    source: dict[str, Any] = {"store": [str(data / "features" / store) for store in stores]}
    if job.online is not None:
        source = {"rows": [str(data / f"{store}.jsonl") for store in stores], "online": job.online.model_dump()}
    values = {**keys, "target": str(target), "head": shape, "data": source}
    trains_blocks = parse_recipe(values, f"the recipe's train.{name}").head.drafts_blocks
    unserved = [key for key in ("benchmark", "package", "traffic") if getattr(job, key)]
    if trains_blocks and unserved:
        raise JobError(
            f"the recipe's train.{name} makes a block drafter, which the stages of {', '.join(unserved)} do not start "
            "servers with yet; set benchmark and package to false, or train another kind of head"
        )
    return yaml.safe_dump(values, sort_keys=False)
