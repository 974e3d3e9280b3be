"""Inputs from outside as accidents and attackers write them: documents with other values, files with other bytes."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FEW = 20  # examples of a test in `make test`
SECONDS = float(os.environ.get("FUZZ_SECONDS", "60"))  # of a test in the matrix

# Values that are where others are expected: other types, limits of numbers, text that means something elsewhere.
WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "0",
        "-1",
        "1e9",
        "nan",
        "null",
        "../x",
        "/",
        "\x00",
        "\ud800",
        "é" * 300,
        "x" * 5000,
        "{}",
        "[]",
        "${HOME}",
    ),
    *([], {}, [[]], [None], [{}], {"": None}, {"a": {"b": []}}, [1, "1", None], [0] * 300),
)


def changed(document: Any) -> st.SearchStrategy[Any]:
    """Copies of a JSON document in which one to four values are others, missing, doubled, or under another name."""

    def apply(changes: list[tuple[int, str, Any]]) -> Any:
        found = copy.deepcopy(document)
        for place, kind, value in changes:
            holders = list(_holders(found))
            if not holders:
                return value
            holder, key = holders[place % len(holders)]
            _change(holder, key, kind, copy.deepcopy(value))
        return found

    kinds = st.sampled_from(["value", "value", "value", "removed", "renamed", "wrapped", "doubled"])
    values = st.one_of(st.sampled_from(WRONG), st.integers(), st.text(max_size=20), st.floats(), _nested())
    return st.lists(st.tuples(st.integers(0, 10_000), kinds, values), min_size=1, max_size=4).map(apply)


def _nested() -> st.SearchStrategy[Any]:
    """Lists in lists, deeper than recursive functions go."""

    def build(depth: int) -> Any:
        value: Any = 1
        for _ in range(depth):
            value = [value]
        return value

    return st.integers(1, 400).map(build)


def _holders(value: Any) -> Any:
    """Every (list or mapping, key) of a document."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _holders(value[key])


def _change(holder: Any, key: Any, kind: str, value: Any) -> None:
    if kind == "value":
        holder[key] = value
    elif kind == "wrapped":
        holder[key] = [holder[key]]
    elif kind == "doubled":
        holder[key] = [holder[key], copy.deepcopy(holder[key])]
    elif isinstance(holder, list):
        del holder[key]
    else:
        found = holder.pop(key)
        if kind == "renamed":
            holder[value if isinstance(value, str) else str(value)] = found


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """Copies of a file that are cut, have other bytes, parts twice, or something before them."""

    def apply(changes: list[tuple[int, str, bytes]]) -> bytes:
        found = content
        for place, kind, other in changes:
            at = place % (len(found) + 1)
            if kind == "cut":
                found = found[:at]
            elif kind == "without":
                found = found[:at] + found[at + len(other) :]
            elif kind == "twice":
                found = found[:at] + found[max(0, at - 40) :]
            else:
                kept = at if kind == "inserted" else at + len(other)
                found = found[:at] + other + found[kept:]
        return found

    kinds = st.sampled_from(["cut", "without", "twice", "inserted", "replaced", "replaced", "replaced"])
    telling = st.sampled_from(
        [b"\x00", b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"\n", b'"', b"{", b"[", b"-", b"1e999", b"9" * 20]
    )
    others = st.one_of(st.binary(min_size=1, max_size=8), telling)
    return st.lists(st.tuples(st.integers(0, 2**20), kinds, others), min_size=1, max_size=4).map(apply)


def as_json(value: Any) -> bytes:
    """A document as a file has it; what JSON cannot write (half of a surrogate pair) is written as it comes."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


def try_inputs(inputs: st.SearchStrategy[Any], attempt: Callable[[Any], None], long: bool) -> None:
    """Call `attempt` with inputs: some of them, or as many as SECONDS allow."""
    end = time.monotonic() + (SECONDS if long else 0)
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    rounds = 0
    while rounds == 0 or time.monotonic() < end:

        @settings(
            max_examples=400 if long else FEW, deadline=None, database=None, suppress_health_check=checks,
            derandomize=not long,
        )  # fmt: skip
        @given(inputs)
        def run(value: Any) -> None:
            attempt(value)

        run()
        rounds += 1


# How long a test tries inputs: a parameter of each.
LONG = pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["some", "many"])
