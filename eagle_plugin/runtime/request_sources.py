"""Reads what one request says of its drafts: whether it has any, and what they come from.

A request says it under the name `FIELD`, as an object {"draft": false} or {"sources": ["head"]}, or as the text
"draft=off" or "sources=head,lookup", which is the form of a header. `request_features` reads what it wants stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

FIELD = "eagle_plugin"
NAMES = ("head", "lookup")
_SWITCHES = {"on": True, "off": False}
_MOST_SHOWN = 60  # characters of a wrong value in a sentence


class RequestError(ValueError):
    """What a request says of its drafts cannot be read: the field, what was found, what is allowed."""


class Sources(NamedTuple):
    """What the draft tree of a request comes from; without both it has no drafts."""

    head: bool = True
    lookup: bool = True

    def __str__(self) -> str:
        """The text that `read_sources` reads."""
        names = [name for name, wanted in zip(NAMES, self, strict=True) if wanted]
        return f"sources={','.join(names)}" if names else "draft=off"


ALL = Sources()
NONE = Sources(head=False, lookup=False)


def read_sources(value: object) -> Sources:
    """What a request asks for by a value of `FIELD`; None asks for nothing in particular. Raises RequestError."""
    if value is None:
        return ALL
    found = as_object(value)
    if not isinstance(found, Mapping):
        raise RequestError(
            f'{FIELD} is {shown(value)}, wanted an object such as {{"draft": false}} or {{"sources": ["head"]}}'
        )
    for name in found:
        if name not in ("draft", "sources", "features"):
            raise RequestError(f"{FIELD} has the name {shown(name)}, wanted draft, sources or features")
    draft, sources = found.get("draft"), found.get("sources")
    if draft is not None and not isinstance(draft, bool):
        raise RequestError(f"{FIELD}.draft is {shown(draft)}, wanted true or false")
    chosen = ALL if sources is None else _of_names(sources)
    return NONE if draft is False else chosen


def as_object(value: object) -> Any:
    """The object that a value stands for; what is none is returned as it is. Raises RequestError."""
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith("{"):
        return _of_text(value)
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise RequestError(f"{FIELD} is {shown(value)}, wanted JSON") from None


def asked_sources(parameters: Mapping[str, Any] | None) -> Sources:
    """The same from an engine's own parameters of a request, which were checked when the request came.

    Not every way to an engine checks them: what cannot be read asks for nothing.
    """
    if not isinstance(parameters, Mapping) or FIELD not in parameters:
        return ALL
    try:
        return read_sources(parameters[FIELD])
    except RequestError:
        return ALL


def _of_names(sources: object) -> Sources:
    if not isinstance(sources, list | tuple):
        raise RequestError(f"{FIELD}.sources is {shown(sources)}, wanted a list of names: {', '.join(NAMES)}")
    for name in sources:
        if name not in NAMES:
            raise RequestError(f"{FIELD}.sources has {shown(name)}, wanted {' or '.join(NAMES)}")
    if not sources:
        raise RequestError(
            f'{FIELD}.sources is [], wanted one or more of {", ".join(NAMES)}; {{"draft": false}} asks for no drafts'
        )
    return Sources(*(name in sources for name in NAMES))


def _of_text(text: str) -> dict[str, object]:
    """The object that a text stands for, whose parts are divided by semicolons."""
    found: dict[str, object] = {}
    for part in text.split(";"):
        name, _, value = (piece.strip().lower() for piece in part.partition("="))
        if name == "draft" and value in _SWITCHES:
            found[name] = _SWITCHES[value]
        elif name == "sources":
            found[name] = [one.strip() for one in value.split(",") if one.strip()]
        else:
            raise RequestError(f"{FIELD} is {shown(text)}, wanted draft=off, draft=on or sources=head,lookup")
    return found


def shown(value: object) -> str:
    """A value as JSON, not longer than a sentence can have."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
