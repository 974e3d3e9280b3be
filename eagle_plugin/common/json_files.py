"""Reads JSON files that must hold an object."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_plugin.common.errors import UserError, json_fault

if TYPE_CHECKING:
    from pydantic import ValidationError


def read_object(path: Path, refusal: type[UserError], fix: str) -> dict[str, Any]:
    """The object of a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        refusal: it cannot be read, or holds something else; the sentence ends with `fix`.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except NotADirectoryError as error:
        raise FileNotFoundError(path) from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise refusal(f"{path} cannot be read ({error.strerror or error}); {fix}") from error
    except (ValueError, RecursionError) as error:
        raise refusal(f"{path} {json_fault(error)}; {fix}") from error
    if not isinstance(found, dict):
        raise refusal(f"{path} holds a JSON {type(found).__name__}, wanted an object; {fix}")
    return found


def kept_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file that may be missing or damaged, which counts as empty."""
    try:
        return read_object(path, UserError, "")
    except (OSError, UserError):
        return {}


def first_fault(error: ValidationError) -> str:
    """What pydantic found first: the field, its value, and what was wanted."""
    fault = error.errors(include_url=False)[0]
    found = "" if fault["type"] == "missing" else f" {reprlib.repr(fault['input'])}"
    place = ".".join(map(str, fault["loc"])) or "the whole"
    return f"{place}{found}: {fault['msg'].removeprefix('Value error, ')}"
