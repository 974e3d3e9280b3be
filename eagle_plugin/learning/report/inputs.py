"""The files that a report is made of: the benchmark's, and what there is of the training's and of the evaluation's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle_plugin.bench.states.document import StatesReport
from eagle_plugin.common.errors import UserError
from eagle_plugin.common.json_files import first_fault, read_object

STATES = ("states.json", "benchmark/states.json")
# Below the folder of a job: where its stages leave their files, the last training run last.
CURVES = ("curve.json", "logs/curve.json", "train/*/logs/curve.json")
EVALUATIONS = ("heads-details.json", "eval/heads-details.json", "eval-details.json", "eval/heads.json")


class ReportError(UserError):
    """A report cannot be made: one sentence with the file, what was found, what was wanted and the fix."""


class _Loose(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)  # files of other commands, which may grow


class CurvePoint(_Loose):
    """One evaluation on held-out documents during the training."""

    update: float
    tokens: float
    seconds: float
    total_loss: float | None = None
    accuracy: list[float] = []
    acceptance: list[float] = []


class Curve(_Loose):
    """`logs/curve.json` of `eagle-plugin train`."""

    held_out: list[CurvePoint]


class HeadStats(_Loose):
    """How one head drafts in one domain in one way, of `FILE-details.json` of `eagle-plugin eval`."""

    accept_length: float
    low: float
    high: float
    cumulative: list[float] = []
    prompts: int = Field(ge=0)


Evaluation = dict[str, dict[str, dict[str, HeadStats]]]  # head -> domain -> way of drafting


class _Evaluation(BaseModel):
    heads: Evaluation


class Inputs(NamedTuple):
    """What there is; None for an optional file that is not there."""

    states: StatesReport
    curve: Curve | None
    evaluation: Evaluation | None


def read_inputs(folder: Path, curve: Path | None = None, evaluation: Path | None = None) -> Inputs:
    """Read states.json in `folder`, and the other files: the given ones, or those found below `folder`.

    Raises:
        ReportError: states.json or a given file is missing, or a file has another form.
    """
    states = _find(folder, STATES)
    if states is None:
        raise ReportError(
            f"{folder} has no states.json; make it with `eagle-plugin benchmark TARGET --head HEAD --out {folder}`"
        )
    curve = curve or _find(folder, CURVES)
    evaluation = evaluation or _find(folder, EVALUATIONS)
    return Inputs(
        _parse(StatesReport, states, "`eagle-plugin benchmark`"),
        None if curve is None else _parse(Curve, curve, "`eagle-plugin train`, logs/curve.json"),
        None if evaluation is None else _read_evaluation(evaluation),
    )


def _find(folder: Path, patterns: Sequence[str]) -> Path | None:
    for pattern in patterns:
        if found := sorted(path for path in folder.glob(pattern) if path.is_file()):
            return max(found, key=lambda path: path.stat().st_mtime)
    return None


def _read_evaluation(path: Path) -> Evaluation:
    wanted = "`eagle-plugin eval --json`, FILE-details.json"
    beside = path.with_name(f"{path.stem}-details.json")  # of FILE.json, which has plain numbers only
    path = beside if beside.is_file() else path
    return _validate(_Evaluation, {"heads": _load(path, wanted)}, path, wanted).heads


def _parse(model: type[Any], path: Path, wanted: str) -> Any:
    return _validate(model, _load(path, wanted), path, wanted)


def _load(path: Path, wanted: str) -> Any:
    fix = f"wanted the file of {wanted}; make it again"
    try:
        return read_object(path, ReportError, fix)
    except FileNotFoundError as error:
        raise ReportError(f"{path} cannot be read (no such file); {fix}") from error


def _validate(model: type[Any], value: Any, path: Path, wanted: str) -> Any:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ReportError(
            f"{path} has {first_fault(error)}; wanted the file of {wanted} of this version, make it again"
        ) from None
