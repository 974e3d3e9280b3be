"""The plans of a feature store: which shards every process of an extraction writes, recorded before the first shard.

    plan-{number:03}-{rank:03}.json

The number counts the extractions into the store: every row file, and every change of the options, is one more. The
newest plan also names the shards that were there before it, so it names every shard that the store must have.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.objects import Folder, ObjectExists
from eagle_plugin.learning.data.store.shards import Shard

PLAN_NAME = re.compile(r"plan-(\d{3,})-(\d{3,})\.json")
VERSION = 1  # raise it when other batches are formed of the same rows: a store is then continued by a new plan


@dataclass(frozen=True)
class Run:
    """One extraction, as every process of it sees it; the same rows and options have the same digest."""

    digest: str
    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, rows_sha256: str, rank: int, world: int, **options: int) -> Run:
        """The run over rows with options that decide which rows are in a batch and in a shard."""
        values = [VERSION, rows_sha256, world, options]
        return cls(hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest(), rank, world)


@dataclass(frozen=True)
class Content:
    """What a shard must have."""

    name: str
    documents: int
    ids_sha256: str

    @classmethod
    def of(cls, name: str, ids: Sequence[str]) -> Content:
        """The content of a shard of documents with these ids, in this order."""
        return cls(name, len(ids), hashlib.sha256(json.dumps(ids).encode()).hexdigest())

    @classmethod
    def found(cls, shard: Shard) -> Content:
        """The content of a shard as its header lists it."""
        return cls.of(shard.name, [entry.id for entry in shard.entries])


@dataclass(frozen=True)
class Plan:
    """What one process of an extraction writes."""

    number: int  # of the extraction in this store, from 0
    rank: int
    world: int
    run: str  # digest of the rows and the options
    manifest: str  # digest of the manifest
    earlier: list[Content]  # the shards of earlier extractions, of all ranks
    shards: list[Content]  # in the order of writing
    sha256: str = ""  # of the other fields

    @property
    def name(self) -> str:
        """The name of its object."""
        return plan_name(self.number, self.rank)

    def to_json(self) -> bytes:
        """The plan, with its sha256, as the bytes of its object."""
        return (json.dumps(asdict(replace(self, sha256=self._digest())), indent=1) + "\n").encode()

    def _digest(self) -> str:
        values = asdict(replace(self, sha256=""))
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_json(cls, data: bytes | bytearray) -> Plan:
        """Parse a plan.

        Raises:
            ValueError: it is not one, or it does not have its sha256.
        """
        try:
            values: dict[str, Any] = json.loads(data)
            contents = {key: [Content(**content) for content in values[key]] for key in ("earlier", "shards")}
            plan = cls(**{**values, **contents})
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{error} is wrong or missing") from error
        if plan.sha256 != plan._digest():
            raise ValueError("it does not have its sha256")
        return plan


def plan_name(number: int, rank: int) -> str:
    """The name of a plan's object."""
    return f"plan-{number:03d}-{rank:03d}.json"


def newest_plans(folder: Folder, names: Iterable[str]) -> tuple[int, dict[int, Plan | str]]:
    """The number of the newest extraction (-1: none), and by rank its plan, or what is wrong with it."""
    found = [(int(match[1]), int(match[2]), name) for name in names if (match := PLAN_NAME.fullmatch(name))]
    newest = max((number for number, *_ in found), default=-1)
    plans: dict[int, Plan | str] = {}
    for number, rank, name in found:
        if number == newest:
            try:
                plans[rank] = Plan.from_json(folder.read(name))
            except FileNotFoundError:
                plans[rank] = "is missing"
            except ValueError as error:
                plans[rank] = f"is damaged: {error}"
    return newest, plans


def create_plan(folder: Folder, plan: Plan) -> None:
    """Record a plan.

    Raises:
        DataError: another process of the same rank has just begun, or the plan cannot be written.
    """
    try:
        folder.create(plan.name, plan.to_json())
    except ObjectExists as error:
        raise DataError(
            f"{folder.url}/{plan.name} was written by another process at the same time; "
            "give every process its own --rank"
        ) from error
