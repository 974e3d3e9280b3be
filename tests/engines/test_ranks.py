"""The agreement of ranks without an engine: two gloo processes that walked different paths leave with one."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agreeing_ranks
import pytest
import torch
from agreeing_ranks import LONGEST, MOST_REQUESTS, REPLAYS, ROUNDS, as_lists, random_paths
from thread_ranks import ThreadRanks
from torch import Tensor

from eagle_plugin.runtime.ranks import HostRanks, RankAgreement


def paths_of_rank(rank: int) -> list[dict]:
    return as_lists([random_paths(rank, number, *shape) for number, shape in enumerate(ROUNDS)])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_all_ranks_take_the_paths_of_the_first(world: int, tmp_path: Path) -> None:
    script = Path(agreeing_ranks.__file__)
    paths = os.pathsep.join([str(script.parents[2]), str(script.parent)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world), str(tmp_path / "meeting")],
            env=environment,
            stdout=subprocess.PIPE,
        )
        for rank in range(world)
    ]
    found = [json.loads(process.communicate(timeout=120)[0]) for process in started]
    for rank in found:
        assert rank["answers"] == paths_of_rank(0), "another path, dtype or memory layout; or changed by a later round"
        assert rank["broadcasts"] == len(ROUNDS), "more than one broadcast per round"
        assert rank["captured"] == as_lists(
            [random_paths(0, number, MOST_REQUESTS, LONGEST) for number in range(REPLAYS)]
        )
    assert paths_of_rank(1) != paths_of_rank(0), "the ranks did not differ: the test shows nothing"


def test_one_rank_asks_nobody() -> None:
    def broadcast(tensor: Tensor, src: int) -> None:
        raise AssertionError("one rank has nobody to agree with")

    ranks = RankAgreement(SimpleNamespace(world_size=1, broadcast=broadcast), MOST_REQUESTS, LONGEST, "cpu")
    accepted = random_paths(0, 0, 3, 4)
    assert all(torch.equal(ours, given) for ours, given in zip(ranks.agree(accepted), accepted, strict=True))


def test_every_round_is_broadcast_from_the_same_memory() -> None:
    """A captured broadcast reads and writes the addresses of its capture."""
    addresses = []
    group = SimpleNamespace(world_size=2, broadcast=lambda tensor, src: addresses.append((tensor.data_ptr(), src)))
    ranks = RankAgreement(group, MOST_REQUESTS, LONGEST, "cpu")
    for number, shape in enumerate(ROUNDS):
        ranks.agree(random_paths(0, number, *shape))
    assert len(addresses) == len(ROUNDS) and set(addresses) == {(addresses[0][0], 0)}


def test_one_host_asks_nobody_and_only_the_first_one_speaks() -> None:
    alone = HostRanks(lambda: SimpleNamespace(world_size=1, rank_in_group=0))  # no group that could be asked
    assert alone.gather("costs") == ["costs"] and alone.any(True) and not alone.any(False)
    logger = logging.getLogger("test_ranks")
    assert alone.logger(logger) is logger
    other = HostRanks(lambda: SimpleNamespace(world_size=2, rank_in_group=1)).logger(logger)
    assert other.disabled and not logger.disabled


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> ThreadRanks:
    """torch's gather is one between two threads."""
    ranks = ThreadRanks()

    def gather(values: list[Any], mine: Any, group: str) -> None:
        assert group == "hosts"
        values[:] = ranks.gather(mine)

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    return ranks


HOSTS = HostRanks(lambda: SimpleNamespace(world_size=2, cpu_group="hosts"))


def test_hosts_hear_of_each_other_over_their_own_group(ranks: ThreadRanks) -> None:
    assert ranks.run(lambda rank: HOSTS.gather(rank == 1)) == [[False, True]] * 2
    assert ranks.run(lambda rank: HOSTS.any(rank == 1)) == [True, True]


@pytest.mark.parametrize("notices", [True, False])
def test_a_rank_that_failed_before_a_gather_of_the_engine_meets_the_others_again(
    ranks: ThreadRanks, notices: bool
) -> None:
    """The engine gathers the addresses of captured buffers in the same group, and one rank did not come so far."""

    def each(rank: int) -> tuple[list[bool], list[str]]:
        if rank == 0:
            handles: list[Any] = [None, None]
            torch.distributed.all_gather_object(handles, ("address", 7), group="hosts")
            assert handles[1] == ("eagle-plugin", True)
        failed = rank == 1 or notices  # the engine may stumble over what it got
        return HOSTS.gather(failed), HOSTS.gather(f"rank {rank}")

    assert ranks.run(each) == [([notices, True], ["rank 0", "rank 1"])] * 2
