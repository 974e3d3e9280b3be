"""Recipes: YAML files that are checked against a pydantic model; the error names all faults."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from eagle_plugin.common.errors import UserError

Model = TypeVar("Model", bound=BaseModel)
MOST_VALUES = 100_000  # of a recipe, with every alias written out
# What PyYAML's constructors raise for a value that has the form of a date, number or binary and is none.
NO_VALUE = (ValueError, TypeError, AttributeError, ArithmeticError, LookupError)
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlist, _SHORT.maxdict = 3, 200, 200, 8, 8


class _DuplicateKey(yaml.YAMLError):
    """A mapping has a key twice: YAML forbids it, and PyYAML would take the last value."""


class _Loader(yaml.SafeLoader):
    """The safe loader, which also refuses a key that a mapping has twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            line = key_node.start_mark.line + 1
            if key_node.value in seen:
                raise _DuplicateKey(
                    f"the key {key_node.value!r} on line {line} is on line {seen[key_node.value]} already; "
                    "keep one of them"
                )
            seen[key_node.value] = line
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, refusal: type[UserError]) -> dict[str, Any]:
    """The mapping in a YAML file; raises `refusal` if there is none, or if a key is there twice."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise refusal(f"{path} cannot be read ({error.strerror}); give the recipe's YAML file") from error
    return parse_yaml(data, str(path), refusal)


def parse_yaml(data: bytes, path: str, refusal: type[UserError]) -> dict[str, Any]:
    """The mapping in the bytes of a YAML file, which `path` names in errors; see `read_yaml`."""
    try:
        # A subclass of the safe loader, which makes plain values only.
        values = yaml.load(data.decode("utf-8"), _Loader)  # noqa: S506
        count = _count_values(values, {})
    except _DuplicateKey as error:
        raise refusal(f"{path}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise refusal(f"{path} is not YAML ({' '.join(str(error).split())}); correct the file") from error
    except NO_VALUE as error:
        raise refusal(f"{path} has a value that YAML cannot read ({error}); put it in quotes, or correct it") from error
    except RecursionError as error:
        raise refusal(f"{path} is nested too deeply to be a recipe; give the recipe's YAML file") from error
    if count > MOST_VALUES:
        raise refusal(
            f"{path} has more than {MOST_VALUES:,} values when its aliases (*name) are written out; wanted a recipe: "
            "write the values without aliases"
        )
    if values is None:
        raise refusal(f"{path} is empty, wanted a mapping of keys; see docs/training.md")
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
            found = "" if isinstance(fault["input"], dict) else f" (got {_SHORT.repr(fault['input'])})"
            hint = ""
            if fault["type"] == "extra_forbidden":
                hint = did_you_mean(str(fault["loc"][-1]), _keys_at(model, fault["loc"][:-1]))
            faults.append(f"{key}: {message}{found}{hint}")
        raise refusal(f"{where} has {len(faults)} wrong key(s): {'; '.join(faults)}; correct them") from error


def override_key(values: dict[str, Any], text: str, refusal: type[UserError]) -> None:
    """Apply `a.b=value` of `--set` to a recipe's mapping, the value in YAML; a number is a place in a list.

    Mappings on the way that are not there are made: `validate` refuses those that the recipe does not know.
    """
    key, sign, value = text.partition("=")
    if not sign or not all(key.split(".")):
        raise refusal(f"--set {text!r} is not key=value; write for example --set optimiser.lr=1e-3")
    try:
        parsed = yaml.safe_load(value)
        count = _count_values(parsed, {})
    except (yaml.YAMLError, RecursionError, *NO_VALUE) as error:
        raise refusal(f"--set {text!r}: {value!r} is not YAML; quote it") from error
    if count > MOST_VALUES:
        raise refusal(f"--set {key}=... has more than {MOST_VALUES:,} values; write them without aliases")
    parts = key.split(".")
    place: Any = values
    for number, part in enumerate(parts):
        above = parts[number - 1] if number else "recipe"
        if isinstance(place, list):
            if not part.isdigit() or int(part) >= len(place):
                raise refusal(f"--set {text!r}: {above} has {len(place)} entries, wanted a number below that")
            index: int | str = int(part)
        elif isinstance(place, dict):
            index = part
        else:
            raise refusal(f"--set {text!r} goes through {above!r}, which is a value; give the key that holds it")
        if number == len(parts) - 1:
            place[index] = parsed
        else:
            if isinstance(place, dict) and place.get(part) is None:
                place[part] = {}
            place = place[index]


def _count_values(value: Any, counted: dict[int, int]) -> int:
    """How many values there are where every alias is written out; PyYAML makes one object of an anchor and its aliases.

    counted: by the identity of the lists and mappings that were counted before. RecursionError where one holds itself.
    """
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in counted:
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        counted[id(value)] = 1 + sum(_count_values(part, counted) for part in parts)
    return counted[id(value)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ ", did you mean X?" if a known name is similar, else an empty text."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


def _keys_at(model: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """The keys that the section at `place`, such as ("phases", 0), of a recipe may have."""
    sections = [model]
    for part in place:
        if isinstance(part, str):
            fields = [
                field
                for section in sections
                for name, field in section.model_fields.items()
                if part in (name, field.alias)
            ]
            sections = [section for field in fields for section in _models_in(field.annotation)] or sections
    return [field.alias or name for section in sections for name, field in section.model_fields.items()]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every pydantic model in a type such as `list[Model] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
