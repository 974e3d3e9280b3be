"""The recipe of `eagle-plugin optimize`: every key with its range."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from eagle_plugin.errors import UserError
from eagle_plugin.models.shipped import head_folder
from eagle_plugin.recipes import read_yaml, validate

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
    evaluate: list[str] = ["mtbench", "humaneval", "gsm8k"]  # held-out sets; [] skips check and evaluation
    compare: Annotated[Path, AfterValidator(head_folder)] | None = None  # the trained head is measured against this one


def read_job(path: Path) -> JobRecipe:
    """Read a recipe.

    Raises:
        JobError: naming every wrong key with its value and what was wanted.
    """
    return validate(JobRecipe, read_yaml(path, JobError), str(path), JobError)
