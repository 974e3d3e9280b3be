"""What the serving benchmark and its trace write: documents, whole or not at all, and pictures beside them."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.markup import escape

from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.machine import installed_versions
from eagle_plugin.bench.picture import PictureError
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.report import write_json
from eagle_plugin.bench.serving.report import StealCount
from eagle_plugin.bench.steal import StealWatch


def versions(engine: str) -> dict[str, str]:
    """The versions on which the speed depends."""
    return installed_versions(("eagle-plugin", *ENGINES[engine].distributions, "torch", "transformers", "openai"))


def steal_count(watch: StealWatch) -> StealCount:
    """The watch's counts as the document holds them."""
    share = watch.over_limit_share
    return StealCount(
        limit=watch.limit,
        spans=watch.spans,
        over_limit=watch.over_limit,
        repeated=watch.repeated,
        over_limit_share=None if share is None else round(share, 3),
    )


def now() -> str:
    """The date of a report."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


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
    except PictureError as error:
        steps.log(f"written to {path}; {escape(str(error))}")
