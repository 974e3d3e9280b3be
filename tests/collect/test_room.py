"""A server is asked for no more than its queue holds, and what was lost takes no room for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
from feature_endpoint import FeatureEndpoint
from store_documents import MANIFEST, make_document
from training_runs import extract_features, write_rows

from eagle_plugin.collect.recorder import Collected, Rows
from eagle_plugin.learning.data import extract
from eagle_plugin.learning.data.collecting.room import PATIENCE_S, Room, sent_bytes
from eagle_plugin.learning.data.store.feature_store import FeatureStore

A, B = "http://a", "http://b"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_share_of_the_queue_of_each_server() -> None:
    room = Room(0.5)
    for name, size in (("1", 30), ("2", 15)):
        assert room.fits(A, 100, size)
        room.ask(name, A, size)
    assert room.fits(A, 100, 5) and not room.fits(A, 100, 6) and room.fits(B, 100, 50)
    assert room.fits(A, 0, 1000), "a server that does not say"
    room.came(["1", "another run's"])
    assert room.fits(A, 100, 35) and not room.fits(A, 100, 36)
    room.forget(["2"])
    assert room.fits(A, 100, 1000), "a document that is larger than the share goes alone"


def test_what_was_lost_takes_no_room() -> None:
    clock = Clock()
    room = Room(1.0, clock)
    for name in ("asked", "answered", "late"):
        room.ask(name, A, 30)
    room.answered("answered")
    clock.now = PATIENCE_S
    room.answered("late")
    room.forget_lost()
    assert not room.fits(A, 100, 11), "not yet"
    clock.now += 1
    room.forget_lost()
    assert room.fits(A, 100, 40) and not room.fits(A, 100, 41)
    room.came(["something else"])
    clock.now = 2 * PATIENCE_S + 0.5
    room.forget_lost()
    assert not room.fits(A, 100, 41), "others still come"
    room.forget_server(A)
    assert room.fits(A, 100, 70) and not room.fits(A, 100, 71), "what was not answered may still come"


def test_no_document_is_larger_than_what_it_is_counted_as() -> None:
    document = make_document(3)
    assert document.aux is not None
    ids = [10_000_000 + token for token in document.ids.tolist()]
    sent = Collected("x" * 300, "s", "train", ids, 2, True, [Rows(document.aux.bfloat16(), document.last.bfloat16())])
    assert sum(len(part) for part in sent.frame()) <= len(sent) == sent_bytes(MANIFEST, len(ids))


def test_rows_are_sent_as_fast_as_the_server_writes(tiny_target: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 60)
    store = extract_features(rows, tiny_target, tmp_path / "store")
    queue = 2 * 60 * 2 * 64 * 4  # bytes of about four documents
    command = [str(rows), "--target", str(tiny_target), "--store", str(tmp_path / "new"), "--endpoint"]
    with FeatureEndpoint(store, tmp_path / "new", queue=queue) as server:
        assert extract.main([*command, server.url]) == 0
        assert server.dropped == 0 and server.asked == len(FeatureStore(store).entries)
    command[4] = str(tmp_path / "again")
    with FeatureEndpoint(store, tmp_path / "again", queue=queue, told=False) as silent:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(extract, "PATIENCE_S", 0.5)
            assert extract.main([*command, silent.url]) == 1
        assert silent.dropped > 0
