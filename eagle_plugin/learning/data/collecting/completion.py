"""Completes a collection: waits until servers have written what they were asked for, and records which shards exist.

Servers write without a plan. The plan that comes after them names all shards, so that a lost one is noticed later.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from eagle_plugin.learning.data.collecting.shards import RANK
from eagle_plugin.learning.data.rows import MIN_RESPONSE, DataError, TokenRow
from eagle_plugin.learning.data.store.contents import SHARD_NAME, Contents, read_contents
from eagle_plugin.learning.data.store.manifest import MANIFEST, Manifest
from eagle_plugin.learning.data.store.objects import Folder, open_folder
from eagle_plugin.learning.data.store.plan import PLAN_NAME, Content, Plan, create_plan
from eagle_plugin.learning.data.store.shards import ShardDamage, read_shard
from eagle_plugin.learning.data.store.sources import add_sources

PAUSE_S = 0.25  # between two looks into the store
PATIENCE_S = 15.0  # without a new shard


def is_stored(row: TokenRow, max_length: int) -> bool:
    """Whether a row becomes a document: servers cut it to max_length tokens, and leave out what is then too short."""
    n = min(len(row.prompt_ids) + len(row.response_ids), max_length)
    return n - len(row.prompt_ids) >= MIN_RESPONSE


def read_manifest(folder: Folder, target: str | Path) -> Manifest:
    """The manifest of a store into which servers write.

    Raises:
        DataError: no server writes there, or the store is of another target.
    """
    try:
        data = folder.read(MANIFEST)
    except FileNotFoundError as error:
        raise DataError(
            f"no server writes into {folder.url} (it has no {MANIFEST}); start one with EAGLE_FEATURES={folder.url}, "
            "or correct the store"
        ) from error
    manifest = Manifest.from_json(data, f"{folder.url}/{MANIFEST}")
    manifest.check_target(target)
    return manifest


class GrowingStore:
    """A store into which servers write: the documents that are there, read from new shards only.

    Raises:
        DataError: no server writes there, or the store is of another target.
    """

    def __init__(self, url: str | Path, target: str | Path) -> None:
        self._folder = open_folder(url)
        self.manifest = read_manifest(self._folder, target)
        self.lengths: dict[str, int] = {}  # tokens of each document
        self._seen: set[str] = set()
        self._found: list[str] = []  # documents that no look has told of: the store failed after they were read

    @property
    def url(self) -> str:
        """The store, as it is shown."""
        return self._folder.url

    def add_sources(self, rows: Path) -> None:
        """Record the sources of a file of rows."""
        add_sources(self._folder, rows)

    def look(self) -> list[str]:
        """Read new shards; the documents in them that were not there before.

        Raises:
            DataError: the store cannot be read.
        """
        names = {name: size for name, size in self._folder.sizes().items() if SHARD_NAME.fullmatch(name)}
        for name in sorted(names.keys() - self._seen):
            try:
                entries = read_shard(self._folder, name, names[name], self.manifest).entries
            except ShardDamage:  # `complete` names it
                entries = []
            self._seen.add(name)
            for entry in entries:
                if entry.id not in self.lengths:
                    self.lengths[entry.id] = entry.length
                    self._found.append(entry.id)
        found, self._found = self._found, []
        return found

    def missing(self, rows: Iterable[TokenRow]) -> list[TokenRow]:
        """The rows that become documents and are not there, as far as it was looked."""
        return [row for row in rows if row.id not in self.lengths and is_stored(row, self.manifest.max_length)]

    def wait(
        self,
        rows: Callable[[], Iterable[TokenRow]],
        told: Callable[[int], None] = lambda left: None,
        patience_s: float = PATIENCE_S,
    ) -> list[TokenRow]:
        """Wait until all rows are there, or nothing new has come for `patience_s`; those that are missing.

        rows: is called when this begins and ends. told: gets how many are missing.
        """
        left = {row.id for row in self.missing(rows())}
        since = time.monotonic()
        while True:
            # What comes while this look reads, the next one finds; to read is not to wait.
            looked, found = time.monotonic(), self.look()
            left.difference_update(found)
            told(len(left))
            if not left:
                return []
            if found:
                since = time.monotonic()
            elif looked - since > patience_s:
                return self.missing(rows())
            time.sleep(PAUSE_S)

    def complete(self) -> tuple[int, list[str]]:
        """Record all shards in a plan; how many documents there are, and the shards that were lost or damaged.

        Raises:
            DataError: shards of `data features` are missing or damaged.
        """
        remove_damaged(self._folder)
        contents = read_contents(self._folder)
        own = _open_plan(contents)
        lost = sorted(name for name in contents.problems if _is_own(name))
        if others := {name: why for name, why in contents.problems.items() if name not in {own, *lost}}:
            name, reason = min(others.items())
            raise DataError(
                f"{self.url} has {name}, which {reason}: run the `data features` command that made it first, then this "
                "one again"
            )
        if own is not None or not contents.plans or lost:
            create_plan(self._folder, _plan_of(contents))
        return len(contents.entries), lost


def remove_damaged(folder: Folder) -> None:
    """Remove damaged shards that servers have written: their documents are collected again."""
    contents = read_contents(folder)
    for name in contents.problems:
        if _is_own(name) and name in contents.names - contents.shards.keys():
            folder.remove(name)


def _is_own(name: str) -> bool:
    found = SHARD_NAME.fullmatch(name)
    return found is not None and int(found[1]) == RANK


def _open_plan(contents: Contents) -> str | None:
    """The plan that servers have written for and that nobody has recorded yet, by its name."""
    newest = max((plan.number for plan in contents.plans.values()), default=-1)
    written = [shard.plan for shard in contents.shards.values() if _is_own(shard.name) and shard.plan is not None]
    if max(written, default=-1) <= newest:
        return None
    return next((name for name in contents.problems if PLAN_NAME.fullmatch(name)), None)


def _plan_of(contents: Contents) -> Plan:
    shards = [Content.found(contents.shards[name]) for name in sorted(contents.shards)]
    number = max([contents.number, *(plan.number + 1 for plan in contents.plans.values())], default=0)
    run = hashlib.sha256(repr(("collect", number, shards)).encode()).hexdigest()
    return Plan(max(number, 0), 0, 1, run, contents.manifest.digest(), shards, [])
