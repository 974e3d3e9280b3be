"""Writes what benchmarks report: documents, whole or not at all, and pictures beside them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from rich.markup import escape

from eagle_plugin.bench.drawing import PictureError
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.machine import Machine, describe_machine, installed_versions
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.quartiles import Strict
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.steal import StealWatch
from eagle_plugin.common.atomic_io import replace_file


class StealCount(Strict):
    """How often the host gave the machine's processor time to others, since the start or the last --resume."""

    limit: float
    spans: int = Field(description="measured spans, repeated ones included; 0: steal is unknown here")
    over_limit: int = Field(description="of them, spans with more steal than the limit")
    repeated: int
    over_limit_share: float | None

    @classmethod
    def of(cls, *watches: StealWatch) -> StealCount:
        """The counts of all watches together."""
        spans, over, repeated = (
            sum(getattr(watch, name) for watch in watches) for name in ("spans", "over_limit", "repeated")
        )
        return cls(
            limit=watches[0].limit if watches else 0.0,
            spans=spans,
            over_limit=over,
            repeated=repeated,
            over_limit_share=round(over / spans, 3) if spans else None,
        )

    def sentence(self) -> str:
        """How much of the measurement had steal."""
        if self.over_limit_share is None:
            return "steal is unknown on this machine"
        return (
            f"steal: {self.over_limit} of {self.spans} measured spans ({self.over_limit_share:.0%}) had more than "
            f"{self.limit:.0%}; {self.repeated} were measured again"
        )


class Settings(Strict):
    """What the results of all benchmarks under load depend on."""

    dtype: str = "bfloat16"
    device: str = "cpu"
    threads: int
    shapes: dict[str, str] = Field(description="steps/topk/draft tokens that each server was started with")
    busy_percent: float = Field(description="use of all cores by other processes before the first measurement")


def settings_of(specs: Mapping[Any, ServerSpec], busy: float) -> dict[str, Any]:
    """The fields of `Settings`."""
    one = next(iter(specs.values()))
    return {
        "dtype": one.dtype,
        "device": one.device,
        "threads": one.threads or 0,
        "shapes": {name: spec.drafts for name, spec in specs.items() if spec.mode != "plain"},
        "busy_percent": busy,
    }


class Report(Strict):
    """What the document of every benchmark says of its engine, its machine and its date."""

    engine: str
    engine_version: str
    versions: dict[str, str]
    machine: Machine
    date: str


def facts_of(engine: str) -> dict[str, Any]:
    """The fields of `Report`, without the version of the running engine."""
    return {"engine": engine, "versions": versions(engine), "machine": describe_machine(), "date": now()}


def versions(engine: str) -> dict[str, str]:
    """The versions on which the speed depends."""
    return installed_versions(("eagle-plugin", *ENGINES[engine].distributions, "torch", "transformers", "openai"))


def now() -> str:
    """The date of a report."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def write_json(report: BaseModel, path: Path) -> None:
    """Write the document atomically: readers see the old file or the complete new one."""
    with replace_file(path) as temporary:
        temporary.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")


def save(document: BaseModel, path: Path) -> None:
    """`write_json`; ValueError if the file cannot be written."""
    try:
        write_json(document, path)
    except OSError as error:
        raise ValueError(f"cannot write {path} ({error.strerror or error}); name another folder with --out") from error


def report_path(out: Path, name: str, engine: str) -> Path:
    """The report's file: `NAME.json` for SGLang, `NAME-ENGINE.json` for others."""
    return out / (f"{name}.json" if engine == "sglang" else f"{name}-{engine}.json")


def draw(document: Any, draw_picture: Callable[[Any, Path], None], path: Path, steps: Steps) -> None:
    """Draw the picture beside the report, and log which files were written."""
    try:
        draw_picture(document, path.with_suffix(".png"))
        steps.log(f"written to {path} and {path.with_suffix('.png')}")
    except (PictureError, OSError) as error:
        steps.log(f"written to {path}; {escape(str(error))}")
