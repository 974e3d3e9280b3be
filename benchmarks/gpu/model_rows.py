"""The rows of benchmarks/gpu/model_speed.py: what was measured of each engine, beside plain decoding."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple


class Measured(NamedTuple):
    """One case at one temperature and number of requests at a time."""

    case: str
    temperature: float
    concurrency: int


def rows_of(seen: dict[Measured, list[dict[str, Any]]], about: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for everything that was measured at least once; about: of each case, `what` it is and its `mode`."""
    plain = {one: median(found, "tokens_per_s") for one, found in seen.items() if one.case == "plain" and found}
    return [
        as_row(one, about[one.case], found, plain.get(one._replace(case="plain")))
        | {"equal_responses": equal_responses(one, found, seen.get(one._replace(case="plain"), []))}
        for one, found in seen.items()
        if found
    ]


def equal_responses(one: Measured, found: list[dict[str, Any]], plain: list[dict[str, Any]]) -> float | None:
    """The share of greedy responses of the last repeat that are those of plain decoding's first.

    In bfloat16 they are not all equal; how many of plain decoding's own are is in its row, after two repeats. None at
    other temperatures, and where there is nothing else to compare with.
    """
    if one.temperature or not plain or found[-1] is plain[0]:
        return None
    same = [a == b for a, b in zip(found[-1]["text"], plain[0]["text"], strict=True)]
    return round(sum(same) / len(same), 3)


def median(found: list[dict[str, Any]], name: str) -> float:
    """Of the repeats."""
    return float(statistics.median(one[name] for one in found))


def as_row(one: Measured, about: dict[str, Any], found: list[dict[str, Any]], plain: float | None) -> dict[str, Any]:
    """A row of the result; plain: tokens per second of plain decoding with as many requests, None: not measured yet."""
    speeds = sorted(repeat["tokens_per_s"] for repeat in found)
    length, speed = median(found, "accept_length"), statistics.median(speeds)
    return (
        one._asdict()
        | about
        | {
            "repeats": len(found),
            "tokens_per_s": round(speed, 1),
            "lowest": round(speeds[0], 1),
            "highest": round(speeds[-1], 1),
            "times_plain": round(speed / plain, 2) if plain else None,
            "accept_length": round(length, 3) if length else None,
        }
    )


def as_sentence(row: dict[str, Any]) -> str:
    """A row as a sentence."""
    length = f", accept length {row['accept_length']:.2f}" if row["accept_length"] else ""
    times = f", {row['times_plain']:.2f}x plain" if row["times_plain"] else ""
    same = row.get("equal_responses")
    length += f", {same:.0%} of the responses are plain decoding's" if same is not None else ""
    many = "1 request" if row["concurrency"] == 1 else f"{row['concurrency']} requests"
    how = f" ({row['mode']})" if row.get("mode") else ""
    return f"{row['what']}{how}, T = {row['temperature']:g}, {many}: {row['tokens_per_s']:,.0f} tokens/s{times}{length}"
