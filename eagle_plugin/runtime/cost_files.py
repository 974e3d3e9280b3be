"""Keeps the costs of a decode round that a server measured at its start, on disk for the next start."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import eagle_plugin
from eagle_plugin.common import keyed_json
from eagle_plugin.common.devices import device_key
from eagle_plugin.common.errors import UserError
from eagle_plugin.common.installed import kernel_libraries
from eagle_plugin.core.shape import Levels, Shape
from eagle_plugin.kernels import loader
from eagle_plugin.policy.costs import Costs, Curve, Forward
from eagle_plugin.runtime import draft_weights, huge_pages, target_weights
from eagle_plugin.runtime.lookups import wants_lookups

VERSION = 12  # of the files' form, and of how the costs are measured


class CostFileError(UserError):
    """A file of costs that cannot be read or understood, or belongs to another server: its costs are measured again."""


def folder() -> Path:
    """Where the files are."""
    return loader.cache_dir().parent / "costs"


def key_of(
    engine: str,
    target: str,
    head: str,
    device: torch.device | str,
    dtype: str,
    caps: Shape,
    *,
    context: int,
    cache_tokens: int,
    **settings: Any,
) -> dict[str, Any]:
    """What costs depend on.

    engine: name and version. target and head: as the user named them. context: tokens of the longest request;
    cache_tokens: of the KV cache, which differ a little from start to start: these two say over how long prefixes is
    measured what a token of them costs. settings: of the engine, what else changes the speed of a forward. Raises
    LookupModeError.
    """
    on_cpu = torch.device(device).type == "cpu"
    return {
        "engine": engine,
        "target": target,
        "head": head,
        **device_key(torch.device(device)),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "target_linear": target_weights.is_wanted(),
        "draft_int8": on_cpu and draft_weights.is_wanted(),
        "huge_pages": on_cpu and huge_pages.available(),
        "caps": list(caps),
        "context": context,
        "cache_tokens": 1 << (max(cache_tokens, 1).bit_length() - 1),  # the power of two below
        "lookup": wants_lookups(),
        "torch": torch.__version__,
        "libraries": kernel_libraries(),
        "plugin": eagle_plugin.__version__,
        "kernels": loader.backend(torch.device(device).type),
        **settings,
    }


def read(key: Mapping[str, Any]) -> Costs | None:
    """The costs of this key; None where none are kept.

    Raises:
        CostFileError: there is a file, but not one that `write` made for this key.
    """
    path = keyed_json.path_of(folder(), key)
    try:
        costs = keyed_json.read(path, key, VERSION)["costs"]
        forwards = {name: _forward(costs[name]) for name in _FORWARDS}
        seconds = {name: _seconds(costs[name]) for name in _SECONDS}
        return Costs(
            **forwards,
            fixed=seconds["fixed"],
            draft=seconds["draft"],
            prompt_token=seconds["prompt_token"],
            levels=Levels(costs["levels"]),
            plain=None if costs["plain"] is None else _forward(costs["plain"]),
        )
    except FileNotFoundError:
        return None
    except keyed_json.OtherKeyError as error:
        raise _fault(path, "was written for another server or by another version") from error
    except (OSError, UnicodeDecodeError) as error:
        raise _fault(path, f"cannot be read ({error})") from error
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise _fault(path, f"has no costs of this form ({type(error).__name__}: {str(error)[:80]})") from error


def write(key: Mapping[str, Any], costs: Costs) -> None:
    """Keep costs.

    Raises:
        WriteError: they cannot be written; what was kept before is as it was.
    """
    as_json: dict[str, Any] = {name: _forward_as_json(getattr(costs, name)) for name in _FORWARDS}
    as_json |= {name: getattr(costs, name) for name in (*_SECONDS, "levels")}
    as_json["plain"] = None if costs.plain is None else _forward_as_json(costs.plain)
    keyed_json.write(keyed_json.path_of(folder(), key), key, VERSION, {"costs": as_json})


_FORWARDS = ("target", "level", "extend")
_SECONDS = ("fixed", "draft", "prompt_token")


def _forward_as_json(forward: Forward) -> dict[str, Any]:
    points = [list(point) for point in zip(*forward.curve, strict=True)]
    return {"seconds_by_rows": points, "per_key": forward.per_key, "per_key_and_row": forward.per_key_and_row}


def _forward(kept: Mapping[str, Any]) -> Forward:
    """Raises ValueError, KeyError or TypeError."""
    points = [(rows, _seconds(seconds)) for rows, seconds in kept["seconds_by_rows"]]
    ascending = [rows for rows, _ in points]
    if not points or any(type(rows) is not int or rows < 1 for rows in ascending):
        raise ValueError("no rows that are whole numbers from 1 on")
    if ascending != sorted(set(ascending)) or not all(seconds > 0 for _, seconds in points):
        raise ValueError("rows that do not ascend, or a forward without a time")
    return Forward(Curve.of(points), _seconds(kept["per_key"]), _seconds(kept["per_key_and_row"]))


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} instead of seconds")
    return float(value)


def _fault(path: Path, what: str) -> CostFileError:
    return CostFileError(f"{path} {what}: the costs of a round are measured again")
