"""The counts of accepted drafts find the answer that they belong to."""

from __future__ import annotations

import json

import pytest
from captured_traffic import stream

from eagle_plugin.traffic.accepted_drafts import AcceptedDrafts


def test_counts_that_nobody_takes_make_place() -> None:
    noted = AcceptedDrafts(most=2)
    for name in "abc":
        noted.note(name, [1])
    assert [noted.take(b'{"id": "%s"}' % name.encode()) for name in "abc"] == [None, [1], [1]]
    assert noted.take(b'{"object": "list"}') is None


@pytest.mark.parametrize("text", ["A", 'A long "id":"x" "meta_info" \\" answer. ' * 100])
def test_the_id_of_generate_is_behind_its_text(text: str) -> None:
    noted = AcceptedDrafts()
    noted.note("r-1", [3, 1])
    body = {"text": text, "output_ids": [1, 2], "meta_info": {"id": "r-1", "finish_reason": {"type": "stop"}}}
    assert noted.take(stream([body | {"text": text[:9]}, body])) == [3, 1]
    noted.note("r-1", [3, 1])
    assert noted.take(json.dumps(body, separators=(",", ":")).encode()) == [3, 1]
