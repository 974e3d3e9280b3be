"""The rows of benchmarks/gpu/model_speed.py: what was measured of each engine, beside plain decoding."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple


class Measured(NamedTuple):
    """One case at one temperature and number of requests at a time."""

    case: str
    temperature: float
    concurrency: int


def rows_of(seen: dict[Measured, list[dict[str, float]]], names: dict[str, str]) -> list[dict[str, Any]]:
    """A row for everything that was measured at least once; names: what each case is."""
    plain = {one: median(found, "tokens_per_s") for one, found in seen.items() if one.case == "plain" and found}
    return [
        as_row(one, names[one.case], found, plain.get(one._replace(case="plain")))
        for one, found in seen.items()
        if found
    ]


def median(found: list[dict[str, float]], name: str) -> float:
    """Of the repeats."""
    return statistics.median(one[name] for one in found)


def as_row(one: Measured, what: str, found: list[dict[str, float]], plain: float | None) -> dict[str, Any]:
    """A row of the result; plain: tokens per second of plain decoding with as many requests, None: not measured yet."""
    speeds = sorted(repeat["tokens_per_s"] for repeat in found)
    length, speed = median(found, "accept_length"), statistics.median(speeds)
    return one._asdict() | {
        "what": what,
        "repeats": len(found),
        "tokens_per_s": round(speed, 1),
        "lowest": round(speeds[0], 1),
        "highest": round(speeds[-1], 1),
        "times_plain": round(speed / plain, 2) if plain else None,
        "accept_length": round(length, 3) if length else None,
    }


def as_sentence(row: dict[str, Any]) -> str:
    """A row as a sentence."""
    length = f", accept length {row['accept_length']:.2f}" if row["accept_length"] else ""
    times = f", {row['times_plain']:.2f}x plain" if row["times_plain"] else ""
    many = "1 request" if row["concurrency"] == 1 else f"{row['concurrency']} requests"
    return f"{row['what']}, T = {row['temperature']:g}, {many}: {row['tokens_per_s']:,.0f} tokens/s{times}{length}"
