"""What the hosts of several ranks decide together."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_ranks import ThreadRanks

from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import PLAIN
from eagle_plugin.runtime.captured_rounds import CapturedRounds
from eagle_plugin.runtime.graph_memory import GraphMemory
from eagle_plugin.runtime.graphs import Buckets
from eagle_plugin.runtime.ranks import OtherRankFailed, RankMissing, ended_in_all_ranks, raised_in_all_ranks


@pytest.mark.parametrize("flags, dropped", [([False, False], []), ([False, True], [2]), ([True, True], [2])])
def test_a_size_without_memory_in_one_rank_is_captured_in_none(
    flags: list[bool], dropped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = pytest.importorskip("eagle_plugin.sglang.capture")
    from sglang.srt import runtime_context

    gathered = []

    def gather(values: list[tuple[str, bool]], mine: tuple[str, bool], group: str) -> None:
        assert group == "hosts"
        name, flag = mine
        gathered.append(flag)
        values[:] = [(name, one) for one in (flags if len(gathered) == 2 else [False, False])]

    group = SimpleNamespace(world_size=2, rank_in_group=0, cpu_group="hosts")
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    sizes = Buckets([1, 2])
    with capture.graph_memory("cpu").tried(sizes, 2):
        if flags[0]:
            raise torch.OutOfMemoryError
    assert gathered == [False, flags[0]]  # nothing else was raised
    assert [size for size in (1, 2) if size not in sizes] == dropped


@pytest.mark.parametrize("place", ["first round", "allocation", "capture"])
def test_what_raises_in_one_rank_hands_the_server_over_in_all(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two sizes the other rank asks whether there was memory, and the one that failed must be there too."""
    selftest = pytest.importorskip("eagle_plugin.sglang.selftest")
    ranks = ThreadRanks()
    monkeypatch.setattr(selftest, "gather_objects", ranks.gather)
    captured: list[list[int]] = [[], []]

    def prepare(rank: int) -> None:
        def fails(at: str) -> None:
            if rank == 1 and place == at:
                raise RuntimeError("no kernel")

        def capture(size: int) -> None:
            if size == 4:
                fails("capture")
            captured[rank].append(size)

        with raised_in_all_ranks(ranks.any):
            fails("first round")
        memory = GraphMemory("cpu", ranks.any)
        rounds: CapturedRounds[Any] = CapturedRounds()
        rounds._capture_sizes([PLAIN], [1, 4, 8], memory, lambda *_: fails("allocation"), capture)

    found = ranks.run(lambda rank: selftest.prepared(lambda: prepare(rank)))
    assert found == [["a first round failed: no kernel"]] * 2
    order = [8, 1, 4] if place == "capture" else []
    assert captured == [order, order[:-1]]


def test_what_the_user_can_correct_is_raised_without_the_other_ranks() -> None:
    def never(flag: bool) -> bool:
        raise AssertionError("the other ranks are not asked")

    with pytest.raises(UserError, match="correct it"), raised_in_all_ranks(never):
        raise UserError("correct it")
    with pytest.raises(OtherRankFailed), raised_in_all_ranks(lambda flag: True):
        pass


@pytest.mark.parametrize("inside", [False, True])
def test_what_raises_at_the_end_of_a_context_is_raised_in_all_ranks(inside: bool) -> None:
    """What is raised inside of it is raised in all of them already: no rank asks another one."""
    ranks, ended = ThreadRanks(), []

    @contextmanager
    def context(rank: int) -> Iterator[None]:
        try:
            yield
        finally:
            ended.append(rank)
        if rank == 1:
            raise IndexError("lists differ")

    def each(rank: int) -> type[BaseException]:
        with pytest.raises(BaseException) as raised, ended_in_all_ranks(context(rank), ranks.any):  # noqa: PT011
            if inside:
                raise KeyError("in all ranks")
        ranks.gather(True)  # the next thing that all of them do
        return raised.type

    assert ranks.run(each) == ([KeyError] * 2 if inside else [OtherRankFailed, IndexError])
    assert sorted(ended) == [0, 1]


def test_nobody_waits_at_the_end_of_a_context_for_a_rank_that_is_missing() -> None:
    ended = []

    @contextmanager
    def context() -> Iterator[None]:
        try:
            yield
        finally:
            ended.append("would gather")

    with pytest.raises(RankMissing), ended_in_all_ranks(context(), lambda flag: True):
        raise RankMissing("another rank")
    gc.collect()
    assert not ended
    with pytest.raises(OtherRankFailed), ended_in_all_ranks(context(), lambda flag: True):
        pass
    assert ended == ["would gather"]


EXIT = """
from contextlib import contextmanager
from eagle_plugin.runtime.ranks import RankMissing, ended_in_all_ranks

@contextmanager
def context():
    try:
        yield
    finally:
        print("would gather", flush=True)

try:
    with ended_in_all_ranks(context(), bool):
        raise RankMissing("another rank")
except RankMissing:
    print("ends", flush=True)
"""


def test_nobody_waits_at_the_exit_for_a_rank_that_is_missing() -> None:
    assert subprocess.run([sys.executable, "-c", EXIT], capture_output=True, check=True, text=True).stdout == "ends\n"
