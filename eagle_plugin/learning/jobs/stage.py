"""One stage of a job."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from eagle_plugin.common.recipes import did_you_mean
from eagle_plugin.learning.jobs.recipe import JobError, JobRecipe


class Stage(NamedTuple):
    """One sub-command of the job; it is done when `output` exists and no stage up to this one has changed since."""

    name: str
    args: list[str]
    output: Path
    needs_server: bool = False
    recipe: str = ""  # of a training run: the content of the file that args[1] names
    partial: tuple[Path, ...] = ()  # what the sub-command continues; removed if it began with other `settings`
    settings: str | None = None  # a list as JSON, of what makes another output; None: all stages up to this one
    prompts: Path | None = None  # answers to others, in the output, are removed
    module: str | None = None  # that Python runs with `args`; None: eagle-plugin


def terms_options(job: JobRecipe) -> list[str]:
    """The options about licences and terms of the sub-commands that have them."""
    options = {"--allow-licenses": job.allow_licenses, "--accept-terms": job.accept_terms}
    return [word for name, values in options.items() if values for word in (name, *values)]


def check_known(key: str, name: str, known: Collection[str]) -> None:
    """JobError if the recipe's key names something unknown."""
    if name not in known:
        hint = did_you_mean(str(name), known)
        raise JobError(f"the recipe's {key} names {name!r}, wanted of {', '.join(known)}{hint}; correct it")
