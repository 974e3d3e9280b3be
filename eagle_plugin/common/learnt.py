"""What the manifest of a head says of the data that it learnt from, as rows for a page."""

from __future__ import annotations

from typing import Any

COLUMNS = ("Source", "Documents", "Response tokens", "Licence", "Terms that forbid training")
LEARNT = ("target_license", "sources", "earlier_sources")  # keys of "training" in the manifest


def source_rows(training: Any) -> list[tuple[str, ...]]:
    """COLUMNS of each source; training: of the manifest, of any origin."""
    training = training if isinstance(training, dict) else {}
    rows: list[tuple[str, ...]] = []
    for key, mark in (("sources", ""), ("earlier_sources", " (before this training)")):
        found = training.get(key)
        for name, one in found.items() if isinstance(found, dict) else ():
            if isinstance(one, dict):
                counts = (_count(one.get("documents")), _count(one.get("response_tokens")))
                rows.append((f"{name}{mark}", *counts, str(one.get("license")), _forbids(one)))
    return rows


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


def _forbids(one: dict[str, Any]) -> str:
    if one.get("trains_models") is False:
        return "accepted by the user" if one.get("accepted") else "yes"
    return "none" if one.get("trains_models") else "not known"
