"""The target and head options that every command which starts a server shares."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.servers import ServerError
from eagle_plugin.bench.spec import TreeShape
from eagle_plugin.models import ModelError, get_model

TARGET = "smollm2-135m-instruct"
HEAD = Path("examples/heads/smollm2-135m-instruct-eagle3")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add `--engine`, `--target` and `--head`."""
    parser.add_argument("--engine", choices=sorted(ENGINES), default="sglang")
    parser.add_argument("--target", default=TARGET, help=f"a model folder, or a name of the catalogue ({TARGET})")
    parser.add_argument("--head", type=Path, default=HEAD, help=f"the draft head's folder ({HEAD})")


def parse_shape(text: str) -> TreeShape:
    """Read `steps/topk/draft tokens`, for example `2/4/8`, or the length of a chain: `2` is `2/1/3`."""
    try:
        numbers = [int(part) for part in text.split("/")]
        return TreeShape(*numbers) if len(numbers) > 1 else TreeShape.chain(numbers[0])
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a tree shape; wanted steps/topk/draft tokens as in 2/4/8, or the length of a chain"
        ) from None


def resolve_target(name: str, console: Console) -> Path:
    """The folder itself, or the catalogue's model of that name, prepared first if it is not there yet."""
    folder = Path(name)
    if folder.is_dir():
        return _model_folder(folder, "--target").resolve()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
    try:
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(f"preparing {name}", total=1.0)
            return get_model(name, lambda what, share: bar.update(task, description=what, completed=share))
    except ModelError as error:
        raise ServerError(f"--target {name}: {error}") from error


def resolve_head(folder: Path) -> Path:
    """The head's folder; ServerError if it is none."""
    return _model_folder(folder, "--head").resolve()


def _model_folder(folder: Path, flag: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ServerError(f"{flag} {folder}: no config.json there; give the folder of a Hugging Face style checkpoint")
    return folder
