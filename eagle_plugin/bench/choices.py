"""The engine, target and head options of every command that starts a server."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from eagle_plugin.bench.engine import Engine
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.fitting import check_fits
from eagle_plugin.bench.machine import installed_versions
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.servers import ServerError
from eagle_plugin.bench.spec import EngineName
from eagle_plugin.common.allow_list import ALLOW_LISTS
from eagle_plugin.common.devices import check_device, default_device
from eagle_plugin.common.errors import json_fault
from eagle_plugin.core.shape import Shape
from eagle_plugin.models import ModelError, head_folder, target_folder
from eagle_plugin.models.shipped import HEAD

TARGET = "smollm2-135m-instruct"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add `--engine`, `--device`, `--target` and `--head`."""
    engine = default_engine()
    parser.add_argument("--engine", choices=sorted(ENGINES), default=engine, help=f"default: {engine}")
    add_device_option(parser)
    parser.add_argument(
        "--target", default=TARGET, help=f"a model folder, or a name of `eagle-plugin models list` (default: {TARGET})"
    )
    parser.add_argument("--head", help=f"the draft head: a folder, or a name of `models list` (for {TARGET}: {HEAD})")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Add `--device`, None if it is not given: see `chosen_device`."""
    help = "of the servers (default: a GPU if there is one)"
    parser.add_argument("--device", choices=["cpu", "cuda"], help=help)


ENGINE_FLAGS = "Flags after -- are passed to the engine and override ours.\n"


def parse_with_engine_flags(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; what follows `--` is in `engine_flags`, for `ServerSpec.extra_flags`."""
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:end])
    options.engine_flags = tuple(given[end + 1 :])
    return options


def chosen_device(name: str | None) -> str:
    """The device of that name, or, for None, a GPU if there is one. DeviceError if torch cannot use it."""
    return default_device() if name is None else check_device(name)


def default_engine() -> EngineName:
    """The engine of this environment; with both or neither, sglang."""
    vllm_only = _is_installed(ENGINES["vllm"]) and not _is_installed(ENGINES["sglang"])
    return "vllm" if vllm_only else "sglang"


def check_engine(name: str, device: str | None = None, needs_plugin: bool = True) -> None:
    """Raise unless this environment can start that engine on that device (None: see `chosen_device`).

    Raises:
        ServerError: something is not installed, or the plugin is needed and the engine's list of plugins drops it.
            DeviceError: torch cannot use the device.
    """
    engine = ENGINES[name]
    if not _is_installed(engine):
        others = [f"--engine {other}" for other in ENGINES if other != name and _is_installed(ENGINES[other])]
        raise ServerError(
            f"--engine {name}: {' or '.join(engine.distributions)} is not installed in the environment of "
            f"{sys.executable}; {f'use {others[0]}, or ' if others else ''}install eagle-plugin beside the engine"
        )
    if needs_plugin and (allowed := ALLOW_LISTS[name]).drops():
        raise ServerError(f"--engine {name}: {allowed.sentence()}; set {allowed.repaired()}, or unset it")
    device = chosen_device(device)
    for module, advice in engine.cpu_modules.items():
        if device == "cpu" and importlib.util.find_spec(module) is None:
            raise ServerError(f"--engine {name}: the engine needs the module {module} on a CPU, found none; {advice}")


def _is_installed(engine: Engine) -> bool:
    return bool(installed_versions(engine.distributions))


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
    if Path(name).is_dir():
        return _model_folder(Path(name), "--target").resolve()
    try:
        with Steps(console).step(f"preparing {name}") as step:
            return target_folder(name, step.update)
    except ModelError as error:
        raise ServerError(f"--target: {error}") from error


def resolve_head(name: str | Path | None, target: Path, engine: EngineName | None = None) -> Path:
    """The head's folder; without a name the shipped head, if the target is the one that it was trained for.

    engine: that has to serve it; None: one of them.

    Raises:
        ServerError: there is no checkpoint, or another target has no --head. HeadError: the head does not fit the
            target, which an engine alone says in a traceback (`fitting.check_fits`).
    """
    if name is None:
        if target.name.lower() != TARGET:
            raise ServerError(
                f"--target {target} needs a --head that was trained for it, found none: the head that comes with "
                f"eagle-plugin is for {TARGET} (`eagle-plugin check TARGET HEAD` tells whether a head fits)"
            )
        name = HEAD
    try:
        head = head_folder(name)
    except ModelError as error:
        raise ServerError(f"--head: {error}") from error
    head = _model_folder(head, "--head").resolve()
    check_fits(target, head, engine)
    return head


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
