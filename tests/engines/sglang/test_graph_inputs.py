"""Dropped captures leave nothing in the engine's own list of the inputs of captured all-reduces."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2

from eagle_plugin.core.shape import PLAIN
from eagle_plugin.runtime.captured_rounds import CapturedRounds
from eagle_plugin.runtime.graph_memory import GraphMemory
from eagle_plugin.runtime.ranks import OtherRankFailed
from eagle_plugin.sglang import capture, graph_inputs

FAILURES = {"no memory": torch.OutOfMemoryError, "a fault": AssertionError}


class Communicator(CustomAllReduceV2):
    """The engine's own, without a GPU: what it registers at the end of captures is noted."""

    def __init__(self) -> None:
        self.disabled, self._is_graph_mode_supported = False, True
        self._graph_inputs, self._graph_counter = [], 0
        self.graph_params = torch.zeros(100, 2)
        self.registered: list[int] = []
        self.fails = False

    def reduce(self, address: int) -> None:
        self._allocate_graph_row(SimpleNamespace(data_ptr=lambda: address), 16)  # type: ignore[arg-type]

    def _register_graph_inputs(self) -> None:
        if self.fails:
            raise IndexError("list index out of range")
        self.registered += [address for address, _ in self._graph_inputs]
        self._graph_counter += len(self._graph_inputs)
        self._graph_inputs.clear()

    def close(self) -> None:
        pass


class Group:
    def __init__(self, communicator: Communicator | None) -> None:
        self.ca_comm = communicator


@pytest.fixture
def communicators(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Communicator]]:
    """Of two groups of ranks; a third one has none, and a fourth is gone."""
    found = [Communicator(), Communicator()]
    groups = {"tp": Group(found[0]), "pp": Group(None), "moe_tp": Group(found[1])}
    registry: dict[str, Any] = {name: lambda group=group: group for name, group in groups.items()}
    monkeypatch.setattr(parallel_state, "_groups", {**registry, "gone": lambda: None})

    @contextmanager
    def engine_captures(stream: Any = None) -> Iterator[None]:
        with found[0].capture(), found[1].capture():
            yield

    monkeypatch.setattr(parallel_state, "graph_capture", engine_captures)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(graph_inputs, "in_any_rank", bool)
    monkeypatch.setattr(capture, "in_any_rank", bool)
    monkeypatch.setattr(capture, "rank_logger", lambda logger: logger)
    yield found
    gc.collect()  # the engine's communicator has a __del__


def captured(communicators: list[Communicator], failure: str = "") -> None:
    """Captures of 4, 1 and 2 requests, two all-reduces each in two groups; the last of 4 in the one group fails."""
    rounds: CapturedRounds[Any] = CapturedRounds()

    def capture_size(size: int) -> None:
        for call in range(2):
            for group, communicator in enumerate(communicators):
                if failure and (size, call, group) == (4, 1, 1):
                    raise FAILURES[failure]("here")
                communicator.reduce(100 * group + 10 * size + call)

    with graph_inputs.captures():
        memory = capture.graph_memory("cpu")
        rounds._capture_sizes([PLAIN], [1, 2, 4], memory, lambda *_: None, capture_size)  # type: ignore[arg-type]


def test_without_a_failure_all_are_registered(communicators: list[Communicator]) -> None:
    captured(communicators)
    assert communicators[0].registered == [40, 41, 10, 11, 20, 21]
    assert communicators[1].registered == [140, 141, 110, 111, 120, 121]


def test_inputs_of_a_size_without_memory_are_not_registered(communicators: list[Communicator]) -> None:
    """A rank has got further than the other: the inputs of the other sizes have the same places in both."""
    captured(communicators, "no memory")
    assert [one.registered for one in communicators] == [[10, 11, 20, 21], [110, 111, 120, 121]]


def test_the_inputs_of_another_rank_are_dropped_with_its_size(communicators: list[Communicator]) -> None:
    from eagle_plugin.runtime.graphs import Buckets

    sizes, asked = Buckets([1, 2]), []

    def in_any_rank(flag: bool) -> bool:
        asked.append(flag)
        return len(asked) == 2  # the other one has no memory

    memory = GraphMemory("cpu", in_any_rank, mark=graph_inputs.mark_inputs)
    communicators[0].reduce(5)
    with memory.tried(sizes, 2):
        communicators[0].reduce(6)
    assert asked == [False, False] and 2 not in sizes
    assert communicators[0]._graph_inputs == [(5, 16)]


def test_what_raises_leaves_nothing_for_the_captures_of_the_engines_worker(communicators: list[Communicator]) -> None:
    with pytest.raises(AssertionError, match="here"):
        captured(communicators, "a fault")
    with parallel_state.graph_capture():
        communicators[0].reduce(7)
    assert [one.registered for one in communicators] == [[7], []]


def test_what_raises_at_the_end_in_one_rank_ends_the_captures_of_all(
    communicators: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(graph_inputs, "in_any_rank", lambda flag: asked.append(flag) or any(asked))
    communicators[0].fails = True
    with pytest.raises(IndexError):
        captured(communicators)
    assert asked == [True] and not communicators[0]._graph_inputs
    communicators[0].fails = False
    with pytest.raises(OtherRankFailed):  # the other rank
        captured(communicators)
    assert asked == [True, False]
