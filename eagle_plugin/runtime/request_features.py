"""Reads what one request says of its hidden states: whether they are stored, and under which name.

A request says it in the object of `request_sources`, {"features": {"id": "chat-1#0", "source": "chat"}}.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from eagle_plugin.collect.settings import STORE
from eagle_plugin.runtime.request_sources import FIELD, RequestError, Sources, as_object, shown

NAMES = ("id", "source", "split", "given", "earlier")
SPLITS = ("train", "val")
_LONGEST = 300  # characters of a name


class Features(NamedTuple):
    """The document that a request becomes in the feature store."""

    id: str
    source: str = ""
    split: str = "train"
    given: int | None = None  # tokens before the answer, where the prompt ends with it; nothing is generated for it
    earlier: tuple[tuple[int, int], ...] = ()  # begin and end, in tokens, of answers before that one


def read_features(value: object) -> Features | None:
    """The document that a request asks for by a value of `FIELD`; None if it asks for none. Raises RequestError."""
    found = None if value is None else as_object(value)
    asked = found.get("features") if isinstance(found, Mapping) else None
    if asked is None or asked is False:
        return None
    name = f"{FIELD}.features"
    if not isinstance(asked, Mapping) or not isinstance(asked.get("id"), str) or not asked["id"]:
        raise RequestError(
            f'{name} is {shown(asked)}, wanted an object with the name of a document: {{"id": "chat-1"}}'
        )
    for key in asked:
        if key not in NAMES:
            raise RequestError(f"{name} has the name {shown(key)}, wanted one of {', '.join(NAMES)}")
    source, split, given = asked.get("source", ""), asked.get("split", "train"), asked.get("given")
    if not isinstance(source, str) or len(source) > _LONGEST or len(asked["id"]) > _LONGEST:
        raise RequestError(f"{name} has an id or a source that is no text of at most {_LONGEST} characters")
    if split not in SPLITS:
        raise RequestError(f"{name}.split is {shown(split)}, wanted {' or '.join(SPLITS)}")
    if given is not None and (type(given) is not int or given < 1):
        raise RequestError(f"{name}.given is {shown(given)}, wanted how many tokens of the prompt precede the answer")
    earlier = asked.get("earlier", ())
    if not _are_spans(earlier, given or 0):
        raise RequestError(
            f"{name}.earlier is {shown(earlier)}, wanted begin and end of answers, one after another before given"
        )
    if not os.environ.get(STORE):
        raise RequestError(f"{name} is asked for, and this server was started without {STORE}")
    return Features(asked["id"], source, split, given, tuple((begin, end) for begin, end in earlier))


def _are_spans(value: object, end: int) -> bool:
    """Whether it is a list of [begin, end], in their order and without common tokens, up to `end`."""
    if not isinstance(value, (list, tuple)) or any(not isinstance(one, list) or len(one) != 2 for one in value):
        return False
    edges = [0, *(edge for one in value for edge in one), end]
    return all(type(edge) is int for edge in edges) and edges == sorted(edges)


def asked_features(parameters: Mapping[str, Any] | None) -> Features | None:
    """The same from an engine's own parameters of a request, which were checked when the request came."""
    if not isinstance(parameters, Mapping) or FIELD not in parameters:
        return None
    try:
        return read_features(parameters[FIELD])
    except RequestError:
        return None


def text_of(sources: Sources, asked: Features | None) -> str:
    """What a request says, as the text that an engine carries and `read_sources` and `read_features` read."""
    if asked is None:
        return str(sources)
    features = {name: value for name, value in asked._asdict().items() if value not in (None, ())}
    names = [name for name, wanted in sources._asdict().items() if wanted]
    return json.dumps({**({"sources": names} if names else {"draft": False}), "features": features})
