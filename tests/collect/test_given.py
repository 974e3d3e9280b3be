"""Rows that are sent as prompt and answer, while the store into which servers write cannot always be read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from store_documents import MANIFEST
from token_endpoint import TokenEndpoint

from eagle_plugin.collect.settings import COLLECTS_HEADER, QUEUE_HEADER
from eagle_plugin.learning.data.collecting import given
from eagle_plugin.learning.data.collecting.given import collect_given
from eagle_plugin.learning.data.generation.endpoints import FIELD
from eagle_plugin.learning.data.generation.run import GenerationSettings
from eagle_plugin.learning.data.rows import DataError, TokenRow

ROWS = [TokenRow(f"row-{number}", "chat", [3, 4], [5, 6, 7], "stop") for number in range(6)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenEndpoint]:
    """Its queue holds one document: without a look that finds it, nothing else is asked for."""
    monkeypatch.setattr(given, "PAUSE_S", 0.001)
    with TokenEndpoint(headers={COLLECTS_HEADER: "on", QUEUE_HEADER: "1"}) as made:
        yield made


def collect(server: TokenEndpoint, faults: int) -> tuple[list[str], dict[str, str]]:
    """The documents that came, and what was refused; the first looks fail."""
    left, known, came = [faults], set[str](), list[str]()

    def look() -> list[str]:
        if left[0]:
            left[0] -= 1
            raise DataError("cannot list the store")
        fields: list[dict[str, Any]] = [body.get(FIELD, {}).get("features", {}) for body in server.requests]
        found = [one["id"] for one in fields if "given" in one and one["id"] not in known]
        known.update(found)
        return found

    store: Any = SimpleNamespace(manifest=MANIFEST, look=look)
    settings = GenerationSettings(max_tokens=1, concurrency=2, collects=True)
    job = collect_given(ROWS, [server.url], settings, store, Console(quiet=True), came.extend)
    refused = asyncio.run(asyncio.wait_for(job, 20))
    came.extend(look())
    return came, refused


@pytest.mark.parametrize("faults", [0, 1, given.MOST_FAILED - 1])
def test_a_store_that_cannot_be_read_for_a_while_is_read_again(server: TokenEndpoint, faults: int) -> None:
    came, refused = collect(server, faults)
    assert sorted(came) == [row.id for row in ROWS] and not refused


def test_a_store_that_cannot_be_read_ends_the_collection(server: TokenEndpoint) -> None:
    with pytest.raises(DataError, match="cannot list the store"):
        collect(server, 1000)
