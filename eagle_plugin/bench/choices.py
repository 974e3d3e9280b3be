"""The target and head options of every command that starts a server."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.servers import ServerError
from eagle_plugin.core.shape import Shape
from eagle_plugin.errors import json_fault
from eagle_plugin.models import ModelError, get_model

TARGET = "smollm2-135m-instruct"
HEAD = Path("examples/heads/smollm2-135m-instruct-eagle3")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add `--engine`, `--target` and `--head`."""
    parser.add_argument("--engine", choices=sorted(ENGINES), default="sglang", help="default: sglang")
    parser.add_argument(
        "--target", default=TARGET, help=f"a model folder, or a name of `eagle-plugin models list` (default: {TARGET})"
    )
    parser.add_argument("--head", type=Path, default=HEAD, help=f"the draft head's folder (default: {HEAD})")


def parse_shape(text: str) -> Shape:
    """Read `steps/topk/draft tokens`, for example `2/4/8`, or the length of a chain: `2` is `2/1/3`."""
    try:
        numbers = [int(part) for part in text.split("/")]
        return Shape(*numbers) if len(numbers) > 1 else Shape.chain(numbers[0])
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a tree shape; wanted steps/topk/draft tokens as in 2/4/8, or the length of a chain"
        ) from None


def resolve_target(name: str, console: Console) -> Path:
    """The folder itself, or the folder of the catalogue's model of that name, which is prepared if it is absent."""
    folder = Path(name)
    if folder.is_dir():
        return _model_folder(folder, "--target").resolve()
    try:
        with Steps(console).step(f"preparing {name}") as step:
            return get_model(name, step.update)
    except ModelError as error:
        raise ServerError(f"--target {name}: {error}") from error


def resolve_head(folder: Path) -> Path:
    """The head's folder; ServerError if it holds no checkpoint."""
    return _model_folder(folder, "--head").resolve()


def _model_folder(folder: Path, flag: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ServerError(f"{flag} {folder}: no config.json there; give the folder of a Hugging Face style checkpoint")
    try:  # now, not in the last lines of an engine's log
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ServerError(
            f"{flag} {folder}: config.json cannot be read ({error.strerror}); correct its rights"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ServerError(f"{flag} {folder}: config.json {json_fault(error)}; copy the checkpoint again") from error
    return folder
