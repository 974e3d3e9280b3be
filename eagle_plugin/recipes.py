"""Recipes: YAML files that are checked against a pydantic model; the error names all faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from eagle_plugin.errors import UserError

Model = TypeVar("Model", bound=BaseModel)


def read_yaml(path: Path, refusal: type[UserError]) -> dict[str, Any]:
    """The mapping in a YAML file; raises `refusal` if there is none."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refusal(f"{path} cannot be read ({error.strerror}); give the recipe's YAML file") from error
    except yaml.YAMLError as error:
        raise refusal(f"{path} is not YAML ({' '.join(str(error).split())}); correct the file") from error
    if not isinstance(values, dict):
        raise refusal(f"{path} holds a {type(values).__name__}, wanted a mapping of keys; see docs/training.md")
    return values


def validate(model: type[Model], values: dict[str, Any], where: str, refusal: type[UserError]) -> Model:
    """The model of these values; raises `refusal` naming every wrong key with its value and what was wanted."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            key = ".".join(map(str, fault["loc"])) or "recipe"
            message = fault["msg"].removeprefix("Value error, ")
            found = "" if isinstance(fault["input"], dict) else f" (got {fault['input']!r})"
            faults.append(f"{key}: {message}{found}")
        raise refusal(f"{where} has {len(faults)} wrong key(s): {'; '.join(faults)}; correct them") from error
