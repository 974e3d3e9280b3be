"""The recipe of `eagle-plugin optimize`: every key with its range."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from eagle_plugin.collect.settings import StatesForm
from eagle_plugin.common.errors import UserError
from eagle_plugin.common.recipes import read_yaml, validate
from eagle_plugin.learning.train.recipe import OnlineSettings
from eagle_plugin.models.shipped import head_folder

Positive = Annotated[int, Field(gt=0)]
Skipped = Annotated[int, Field(ge=0)]


class JobError(UserError):
    """A recipe is wrong, or a stage of a job failed."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SetSettings(_Section):
    """A data set of `eagle-plugin data set`."""

    name: str
    path: Path | None = None  # a file or folder with the set's files; default: its package, or the hub
    revision: str | None = None  # of the hub; default: the newest, which is recorded
    sha256: str | None = None  # the digest that the set's files must have
    license: str | None = None  # default: as its card says
    limit: Positive | None = None  # records, from the first


class PromptSettings(_Section):
    """Prompts: files in any format that `data prepare` reads, well-known data sets, or the built-in ones."""

    files: list[Path] = []
    sets: list[SetSettings] = []  # well-known data sets by name
    builtin: Positive | None = None  # how many built-in prompts
    skip: Skipped = 0  # built-in prompts to leave out, from the first: those that the head was trained on
    privacy: str = "drop"  # of files, as in `data prepare`
    license: str | None = None  # of files without FILE.source.json
    forbids_training: bool = False  # the terms of these files forbid to train other models on them


class GenerateSettings(_Section):
    """Answers of the target: from running endpoints, or from a stock engine that the job starts and stops."""

    endpoints: list[str] = []  # default with `online`: its servers
    temperatures: list[Annotated[float, Field(ge=0, le=2)]] = []  # default: each prompt's own
    max_tokens: Positive = 192
    concurrency: Positive = 112
    timeout: Annotated[float, Field(ge=1)] | None = None  # seconds per request; default: as in `data generate`


class RecordedSettings(_Section):
    """Recorded dialogues of the built-in prompts, which the target reads but did not generate."""

    count: Positive
    skip: Skipped = 0  # dialogues to leave out, from the first
    max_length: Positive = 512


class TrafficSettings(_Section):
    """Questions that a server with the head `compare` answers; its answers and hidden states are trained on."""

    prompts: Path | None = None  # a file of `data prepare`; default: questions about Python's standard library
    count: Positive = 300  # prompts that are asked
    held_out: Positive = 40  # other prompts, which only measurements ask
    max_tokens: Positive = 192
    concurrency: Positive = 32
    eval_tokens: Positive = 128  # longest answer on which accept lengths are measured


class ExchangeSettings(_Section):
    """The trained head takes the place of `compare` in a float32 server while clients ask held-out prompts."""

    clients: Positive = 3
    questions: Positive = 9
    max_tokens: Positive = 48


class BenchmarkSettings(_Section):
    """`eagle-plugin benchmark` of the trained head, the base head and the target without EAGLE."""

    engine: Literal["sglang", "vllm"] | None = None  # default: the one of this environment; also of the package
    concurrency: Annotated[list[Positive], Field(min_length=1)] = [1, 2, 4, 8]
    repeats: Positive = 5
    prompts: Path | None = None  # a file of `data prepare`; default: the job's own prompts
    sets: list[str] | None = None  # default: none beside prompts; without prompts the held-out sets of `evaluate`
    limit: Positive = 80  # prompts of each set
    max_tokens: Annotated[int, Field(ge=2)] = 64
    aiperf: bool = False  # every cell once more by aiperf


class JobRecipe(_Section):
    """A whole recipe: prompts and training runs, or a head that exists and is only checked and measured."""

    target: str
    head: Annotated[Path, AfterValidator(head_folder)] | None = None  # your own head, instead of prompts and train
    prompts: PromptSettings = PromptSettings()
    generate: GenerateSettings = GenerateSettings()
    recorded: RecordedSettings | None = None
    traffic: TrafficSettings | None = None  # in place of prompts, generate and recorded
    online: OnlineSettings | None = None  # servers that compute the states while training, in place of a feature store
    vocabulary: Positive | None = None
    aux_layers: list[Positive] | None = None
    states: StatesForm = "bfloat16"  # in which the features are stored
    train: dict[str, dict[str, Any]] = {}  # name -> keys of `eagle-plugin train`, in order
    train_processes: Positive | None = None  # of each training run; default: one per GPU, one without a GPU
    allow_licenses: list[str] = []  # of the sources; default: any
    accept_terms: list[str] = []  # sources on which you may train although their terms forbid it
    evaluate: list[str] = ["mtbench", "humaneval", "gsm8k"]  # held-out sets; [] skips check and evaluation
    compare: Annotated[Path, AfterValidator(head_folder)] | None = None  # the trained head is measured against this one
    benchmark: BenchmarkSettings | Literal[False] = BenchmarkSettings()
    report: bool = True  # the page of the benchmark
    package: bool = True  # the folder that an engine serves
    exchange: ExchangeSettings | None = None  # needs `traffic`

    @model_validator(mode="after")
    def _check(self) -> JobRecipe:
        if (self.head is None) != bool(self.train):
            raise ValueError(
                f"wanted either train, with a name and keys of each training run, or head, found "
                f"{'both' if self.train else 'neither'}"
            )
        if self.traffic is not None and (self.compare is None or self.prompts != PromptSettings() or self.recorded):
            raise ValueError("traffic needs the head that serves in `compare`, and no prompts and recorded beside it")
        if self.traffic is not None and self.aux_layers is not None:
            raise ValueError("traffic has the aux layers of the head that serves; delete aux_layers")
        if self.states != "bfloat16" and (self.traffic is not None or self.online is not None):
            raise ValueError("servers store the states as their EAGLE_FEATURES_STATES says; delete states")
        if self.online is not None and (self.traffic is not None or self.head is not None):
            raise ValueError("online is for train with prompts, and not beside traffic or head; delete one of them")
        if self.online is not None and self.aux_layers is not None:
            raise ValueError("online has the aux layers of the head that its servers draft with; delete aux_layers")
        if self.exchange is not None and self.traffic is None:
            raise ValueError("exchange asks the held-out prompts of traffic, and there is no traffic; add it")
        return self


def read_job(path: Path) -> JobRecipe:
    """Read a recipe.

    Raises:
        JobError: naming every wrong key with its value and what was wanted.
    """
    return validate(JobRecipe, read_yaml(path, JobError), str(path), JobError)
