"""What a feature store has, compared with what it must have: existence, sizes and counts of all its shards."""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.manifest import MANIFEST, Manifest
from eagle_plugin.learning.data.store.objects import Folder
from eagle_plugin.learning.data.store.plan import Content, Plan, Run, newest_plans, plan_name
from eagle_plugin.learning.data.store.shards import Entry, Shard, ShardDamage, read_shard

SHARD_NAME = re.compile(r"shard-(\d{3,})-(\d{6,})\.safetensors")
REPAIR = (
    "run the same `eagle-plugin data features` command again, or `data collect`: it extracts exactly what is missing "
    "or damaged"
)
HEADERS = 16  # read at the same time: a remote store needs one round trip per header


@dataclass(frozen=True)
class Contents:
    """The objects of a store. A store that was written before there were plans can lack shards unnoticed."""

    manifest: Manifest
    names: set[str]  # of all objects
    shards: dict[str, Shard]  # those whose headers are as they were written, by name
    problems: dict[str, str]  # name of an object -> what is wrong with it
    plans: dict[int, Plan]  # of the newest extraction, by rank
    number: int  # of the newest extraction that left something, -1 without plans

    @property
    def entries(self) -> list[Entry]:
        """All documents, by rank and in the order of writing; of two with one id, the first."""
        entries: dict[str, Entry] = {}
        for name in sorted(self.shards):
            for entry in self.shards[name].entries:
                entries.setdefault(entry.id, entry)
        return list(entries.values())


def read_contents(folder: Folder) -> Contents:
    """List a store and read the headers of its shards: one request for the listing, and one per shard and plan.

    Raises:
        DataError: there is no store, or it cannot be read. What is damaged or missing is not raised but returned.
    """
    try:
        manifest = Manifest.from_json(folder.read(MANIFEST), f"{folder.url}/{MANIFEST}")
    except FileNotFoundError as error:
        raise DataError(
            f"{folder.url} is not a feature store (no {MANIFEST}); write one with `eagle-plugin data features`"
        ) from error
    sizes = folder.sizes()
    names = [name for name in sizes if SHARD_NAME.fullmatch(name)]

    def read(name: str) -> Shard | str:
        try:
            return read_shard(folder, name, sizes[name], manifest)
        except ShardDamage as damage:
            return str(damage)

    with ThreadPoolExecutor(HEADERS) as pool:
        found = dict(zip(names, pool.map(read, names), strict=True))
    shards = {name: shard for name, shard in found.items() if isinstance(shard, Shard)}
    problems = {name: reason for name, reason in found.items() if isinstance(reason, str)}
    number, by_rank = newest_plans(folder, sizes)
    plans = {rank: plan for rank, plan in by_rank.items() if isinstance(plan, Plan)}
    problems |= {plan_name(number, rank): reason for rank, reason in by_rank.items() if isinstance(reason, str)}
    written = max((shard.plan for shard in shards.values() if shard.plan is not None), default=-1)
    if written > number:  # its shards know the plan, and it is not there
        problems[plan_name(written, 0)] = "is missing"
    for plan in plans.values():
        problems |= _compare(plan, manifest, shards, found)
        for rank in set(range(plan.world)) - by_rank.keys():
            problems[plan_name(number, rank)] = f"is missing: process {rank} of {plan.world} has not begun"
    return Contents(manifest, set(sizes), shards, problems, plans, max(number, written))


def _compare(plan: Plan, manifest: Manifest, shards: dict[str, Shard], found: Iterable[str]) -> dict[str, str]:
    problems = {}
    if plan.manifest != manifest.digest():
        problems[MANIFEST] = "is not the manifest that the features were written with"
    known = set(found)
    for content in (*plan.earlier, *plan.shards):
        if content.name not in known:
            problems[content.name] = "is missing"
        elif content.name in shards and (there := Content.found(shards[content.name])) != content:
            documents = f"{there.documents:,} documents, wanted {content.documents:,}"
            problems[content.name] = f"has other documents than were written to it ({documents})"
    return problems


def plans_of_run(found: Contents, run: Run) -> tuple[int, dict[int, Plan]]:
    """The number of the plans of a run, and those that are there by rank: the newest ones, or none and the next number.

    A run has new plans if other rows or options came after it, if its own plan is damaged, or if a shard of an earlier
    run is gone, whose documents are then planned again.
    """
    plans = {rank: plan for rank, plan in found.plans.items() if plan.run == run.digest}
    older = any(plan.number != found.number for plan in plans.values())
    damaged = run.rank not in plans and plan_name(found.number, run.rank) in found.names
    lost = any(content.name not in found.shards for plan in plans.values() for content in plan.earlier)
    return (found.number + 1, {}) if not plans or older or damaged or lost else (found.number, plans)


def check_contents(contents: Contents, url: str) -> None:
    """Raise DataError, naming the first problem and the fix, if there is one."""
    if not contents.problems:
        return
    name, reason = min(contents.problems.items())
    more = f", and {len(contents.problems) - 1} more" if len(contents.problems) > 1 else ""
    repair = f"copy {MANIFEST} again" if name == MANIFEST else REPAIR
    raise DataError(f"{url} is not whole: {name} {reason}{more}; {repair}")
