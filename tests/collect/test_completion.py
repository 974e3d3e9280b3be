"""How long a collection waits for documents that servers are still writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kept_documents import keep_document, write_kept
from rich.console import Console
from store_documents import MANIFEST, make_document

from eagle_plugin.learning.data.collecting import command, completion
from eagle_plugin.learning.data.collecting.completion import GrowingStore
from eagle_plugin.learning.data.collecting.shards import OpenShards
from eagle_plugin.learning.data.generation.run import GenerationSettings
from eagle_plugin.learning.data.rows import DataError, TokenRow
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.objects import LocalFolder

PATIENCE = 15.0
ROWS = 5


class World:
    """A store and a clock: a server writes the next document at every pause, as many as are left."""

    def __init__(self, store: Path) -> None:
        self.now, self.paused, self.left, self.read = 0.0, 0, 0, 0
        self._shards = OpenShards(str(store), MANIFEST, 2000)
        self._number = 0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.paused += 1
        if self.left:
            self.left -= 1
            self.write()

    def write(self) -> None:
        self._number += 1
        keep_document(self._shards, make_document(self._number))
        write_kept(self._shards)

    def rows(self) -> Iterator[TokenRow]:
        """To read them takes longer than the patience."""
        self.read += 1
        self.now += 2 * PATIENCE
        for number in range(1, ROWS + 1):
            document = make_document(number)
            prompt, response = document.ids[~document.mask].tolist(), document.ids[document.mask].tolist()
            yield TokenRow(document.id, document.source, prompt, response, "stop")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    monkeypatch.setattr(Manifest, "check_target", lambda *_: None)
    monkeypatch.setattr(completion, "time", SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep))
    return made


def test_reading_the_rows_is_no_waiting(world: World, tmp_path: Path) -> None:
    world.left = ROWS
    told: list[int] = []
    assert GrowingStore(tmp_path, "target").wait(world.rows, told.append, PATIENCE) == []
    assert told == [5, 4, 3, 2, 1, 0] and world.read == 1


def test_what_came_during_a_long_look_is_found(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that takes longer than the patience, after which the last document comes."""
    store = GrowingStore(tmp_path, "target")
    for _ in range(ROWS - 1):
        world.write()
    look = store.look

    def slow() -> list[str]:
        found = look()
        world.now += 2 * PATIENCE
        if world.left == 0 and world.paused == 0:
            world.left = 1
        return found

    monkeypatch.setattr(store, "look", slow)
    assert store.wait(world.rows, patience_s=PATIENCE) == []


def test_what_does_not_come_is_waited_for_no_longer_than_the_patience(world: World, tmp_path: Path) -> None:
    world.left = 3
    store = GrowingStore(tmp_path, "target")
    missing = store.wait(world.rows, patience_s=PATIENCE)
    assert [row.id for row in missing] == ["row-4", "row-5"]
    waited = (world.paused - 3) * completion.PAUSE_S
    assert PATIENCE < waited <= PATIENCE + 2 * completion.PAUSE_S


def test_a_look_that_fails_loses_no_document(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second shard cannot be read at first: the next look tells of the first one too."""
    store = GrowingStore(tmp_path, "target")
    world.write()
    world.write()
    read: Callable[..., object] = LocalFolder.read
    failing = {max(name for name in LocalFolder(tmp_path).names() if name.startswith("shard"))}

    def fails_once(folder: LocalFolder, name: str, *part: int) -> object:
        if name in failing:
            failing.remove(name)
            raise DataError("no network")
        return read(folder, name, *part)

    monkeypatch.setattr(LocalFolder, "read", fails_once)
    with pytest.raises(DataError, match="no network"):
        store.look()
    assert store.look() == ["row-1", "row-2"] and store.look() == []


def test_documents_that_come_while_rows_are_sent_are_shown(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []
    monkeypatch.setattr(command, "report_progress", lambda done, total, unit: shown.append(done))

    async def collect_given(*given: Any) -> dict[str, str]:
        *_, came = given
        for number in range(1, ROWS + 1):
            world.write()
            came(["another run's", f"row-{number}"])
        return {}

    monkeypatch.setattr(command, "collect_given", collect_given)
    console = Console(quiet=True)
    store = GrowingStore(tmp_path, "target")
    found = command.complete(store, world.rows, [], GenerationSettings(), PATIENCE, console, given=True)
    assert shown[:ROWS] == [1, 2, 3, 4, 5] and (found.wanted, found.given, found.missing) == (ROWS, ROWS, 0)
