"""Batches between the target and the store: in order, bounded, and from a GPU on a stream of their own (with fakes)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_plugin.learning.data.rows import DataError, TokenRow
from eagle_plugin.learning.data.store.batch_queue import AHEAD, BatchQueue, HostCopies, StatesBatch
from eagle_plugin.learning.data.store.feature_store import Document

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def make_batch(number: int) -> StatesBatch:
    """Two rows, the second one with padding."""
    rows = [TokenRow(f"{number}-{i}", "test", [1] * (2 - i), [2, 3], "stop", "train") for i in range(2)]
    lengths = [4, 3]
    states = torch.arange(48.0).view(2, 4, 6) + number
    return StatesBatch(rows, lengths, torch.full((2, 4), number), states, states[..., :2].contiguous())


class Writer:
    """In place of a writer of a store: what it is given, and, before it takes the first document, a wait."""

    def __init__(self, until: threading.Event) -> None:
        self.until, self.begun = until, 0
        self.log: list[Any] = []
        self.most = 0

    def add(self, document: Document) -> None:
        assert self.until.wait(60)
        self.most = max(self.most, self.begun - len(self.log) // 2)
        self.log.append(document)

    def finish(self, name: str) -> None:
        self.log.append(name)


def test_the_target_computes_while_a_batch_is_written_and_never_far_ahead() -> None:
    go = threading.Event()
    writer: Any = Writer(go)
    with BatchQueue(writer, CPU) as queue:
        for number in range(6):
            if number == AHEAD:  # these batches were put although nothing could be added
                assert writer.log == []
                go.set()
            writer.begun += 1
            queue.put(make_batch(number), "shard" if number == 5 else None)
    assert [getattr(one, "id", one) for one in writer.log] == [f"{k}-{i}" for k in range(6) for i in range(2)] + [
        "shard"
    ]
    assert writer.most <= AHEAD + 1
    found, batch = writer.log[3], make_batch(1)
    assert found.ids.tolist() == [1, 1, 1] and found.mask.tolist() == [False, True, True]
    assert batch.aux is not None and found.aux.equal(batch.aux[1, :3]) and found.last.equal(batch.last[1, :3])


def test_an_error_of_the_thread_is_told_and_one_of_the_target_keeps_what_was_computed() -> None:
    go = threading.Event()
    go.set()
    writer: Any = Writer(go)

    def refuse(name: str) -> None:
        raise DataError(f"the disk is full: {name}")

    with pytest.raises(ValueError, match="of the target"), BatchQueue(writer, CPU) as queue:
        queue.put(make_batch(0), "shard")
        raise ValueError("of the target")
    assert writer.log[-1] == "shard"
    writer.finish = refuse
    put = 0
    with pytest.raises(DataError, match="the disk is full: first"), BatchQueue(writer, CPU) as queue:
        for put in range(20):
            queue.put(make_batch(put), "first" if put == 1 else None)
    assert put == 1 + AHEAD
    with pytest.raises(DataError, match="the disk is full: last"), BatchQueue(writer, CPU) as queue:
        queue.put(make_batch(0), "last")


def test_states_of_a_gpu_are_copied_into_pinned_memory_after_they_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[Any] = []
    here: list[Any] = []  # the streams that have been entered
    pinned: set[int] = set()
    empty, copy = torch.empty, Tensor.copy_

    class Stream:
        def wait_stream(self, other: object) -> None:
            log.append(("after", other))

        def record_event(self, event: Any) -> Any:
            log.append("copied")
            return event

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking

        def synchronize(self) -> None:
            log.append("there")

    @contextlib.contextmanager
    def enter(stream: Stream) -> Iterator[None]:
        here.append(stream)
        yield
        here.pop()

    def make(*shape: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        made = empty(*shape, **more)
        if pin_memory:
            pinned.add(made.data_ptr())
        return made

    def watch(place: Tensor, states: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            assert here == [side] and place.data_ptr() in pinned
            log.append("copy")
        return copy(place, states)

    side = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "computing")
    monkeypatch.setattr(torch, "empty", make)
    monkeypatch.setattr(Tensor, "copy_", watch)
    monkeypatch.setattr(Tensor, "record_stream", lambda states, stream: log.append(("held for", stream)))

    held = [("held for", side), "copy"]
    batch, event = HostCopies(GPU).send(make_batch(7)._replace(aux=None))
    assert log == [("after", "computing"), *held, "copied"] and batch.aux is None
    assert batch.last.equal(make_batch(7).last) and isinstance(event, Event)

    log.clear()
    go = threading.Event()
    go.set()
    writer: Any = Writer(go)
    writer.log = log
    with BatchQueue(writer, GPU) as queue:
        queue.put(make_batch(8), None)
    assert log[:7] == [("after", "computing"), *held, *held, "copied", "there"]
    wanted = make_batch(8)
    assert log[7].last.equal(wanted.last[0]) and wanted.aux is not None and log[8].aux.equal(wanted.aux[1, :3])
