"""Batches that are read by several threads, and their way to a GPU, with fakes of torch's streams."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from training_runs import extract_features, recipe

from eagle_plugin.learning.data.store.feature_store import Document
from eagle_plugin.learning.data.store.states import expand
from eagle_plugin.learning.train import batches as batches_module
from eagle_plugin.learning.train import feed
from eagle_plugin.learning.train.batches import Batch, pack
from eagle_plugin.learning.train.distributed import Ranks
from eagle_plugin.learning.train.document_order import Position
from eagle_plugin.learning.train.feed import Feed
from eagle_plugin.learning.train.recipe import DataSettings, parse_recipe
from eagle_plugin.learning.train.sources import GPU_READERS, StoreSource, mask_out, open_source

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def open_feed(features: Any, source: StoreSource, device: torch.device = CPU) -> Feed:
    values = recipe(features.target, features.store, micro_tokens=50, batch_tokens=120, budget={"epochs": 2})
    return Feed(parse_recipe(values, "recipe"), source, Ranks(0, 1, device))


def all_batches(features: Any, source: StoreSource) -> list[Batch]:
    with open_feed(features, source).open(Position()) as steps:
        return [batch for _, batches in steps for batch in batches]


def same(first: Batch, second: Batch) -> bool:
    return all(ours.equal(theirs) for ours, theirs in zip(first.tensors, second.tensors, strict=True))


def test_a_forward_on_a_gpu_is_bounded_without_a_key(features, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "GpuCopies", lambda device: None)
    source = StoreSource(features.target, DataSettings.model_validate({"store": str(features.store)}))
    settings = parse_recipe(recipe(features.target, features.store, batch_tokens=10**6), "recipe")
    source.items = [replace(item, length=1000) for item in source.items]
    for device, most in ((CPU, len(source.items) * 1000), (GPU, 8192)):
        step = Feed(settings, source, Ranks(0, 1, device))._plan_step(Position())
        assert step is not None
        tokens = [sum(source.items[i].length for i in micro.documents) for micro in step.micros]
        assert max(tokens) <= most and (len(tokens) == 1) == (device is CPU)
    source.close()


def test_several_readers_give_the_same_batches_in_the_same_order(features) -> None:
    data = DataSettings.model_validate({"store": str(features.store)})
    made = {device: open_source(features.target, data, torch.float32, Ranks(0, 1, device)) for device in (CPU, GPU)}
    assert made[CPU].readers == 1 and made[GPU].readers == GPU_READERS > 1
    one, several = made[CPU], made[GPU]
    assert isinstance(one, StoreSource) and isinstance(several, StoreSource)
    expected = all_batches(features, one)

    numbers = iter(range(10**6))
    later, waited = threading.Event(), []
    read = several.read

    def read_first_last(indices: Sequence[int]) -> list[Document]:
        """The first read ends after a later one, of another thread."""
        if next(numbers) == 0:
            waited.append(later.wait(60))
            return read(indices)
        if threading.current_thread() is not threading.main_thread():
            later.set()
        return read(indices)

    several.read = read_first_last  # type: ignore[method-assign]
    found = all_batches(features, several)
    assert waited == [True] and len(found) == len(expected) > 10
    assert all(same(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert not same(found[0], found[1])  # control
    one.close()
    several.close()


class FakeStream:
    """Notes what a stream of CUDA is asked."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def record_event(self) -> str:
        self.log.append("copied")
        return "arrival"

    def wait_event(self, event: str) -> None:
        self.log.append(("wait", event))


def open_for(features: Any, device: torch.device, *stores: Path) -> StoreSource:
    data = DataSettings.model_validate({"store": [str(store) for store in stores]})
    source = open_source(features.target, data, torch.float32, Ranks(0, 1, device))
    assert isinstance(source, StoreSource)
    return source


@pytest.fixture(scope="module")
def float8(features, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract_features(features.rows, features.target, tmp_path_factory.mktemp("float8"), states="float8")


def test_states_in_float8_stay_so_until_they_are_on_the_gpu(features, float8: Path) -> None:
    ours, theirs = open_for(features, GPU, float8), open_for(features, CPU, float8)
    stored, read = ours.read([3])[0], theirs.read([3])[0]
    assert stored.last.dtype == torch.float8_e4m3fn and stored.scales is not None and read.scales is None
    assert stored.nbytes < 0.7 * read.nbytes
    assert all(one.dtype == torch.bfloat16 for one in (read.aux, read.last) if one is not None)
    found, expected = all_batches(features, ours), all_batches(features, theirs)
    assert all(same(batch, other) for batch, other in zip(found, expected, strict=True))
    assert not same(found[0], all_batches(features, open_for(features, CPU, features.store))[0])  # control: rounded
    idle = pack([mask_out(stored), mask_out(ours.read([4])[0])]).expand()
    assert same(idle, pack([mask_out(read), mask_out(theirs.read([4])[0])]))
    with pytest.raises(ValueError, match="2 documents, 1 of them in float8"):
        pack([stored, read])
    # With stores of both forms all are read in bfloat16: documents of both may be in one batch.
    mixed = open_for(features, GPU, float8, features.store)
    assert mixed.read([3])[0].scales is None
    for source in (ours, theirs, mixed):
        source.close()


def test_the_gpu_expands_states_without_a_wait(features) -> None:
    with FakeTensorMode():
        ids, starts, mask = (
            torch.zeros(5, dtype=dtype, device=GPU) for dtype in (torch.int64, torch.int64, torch.bool)
        )
        last, aux = (torch.empty(5, width, device=GPU).to(torch.float8_e4m3fn) for width in (4, 12))
        for states in (aux, None):
            batch = Batch(ids, mask, starts, states, last, torch.empty(5, 4, device=GPU)).expand()
            assert all(tensor.device.type == "cuda" for tensor in batch.tensors) and batch.scales is None
            assert batch.last.dtype == torch.bfloat16 and batch.last.shape == (5, 4)
            assert states is None or batch.aux is not None and batch.aux.shape == (5, 12)


@pytest.mark.parametrize(("states", "copies"), [("bfloat16", 5), ("float8", 6)])
def test_batches_reach_a_gpu_from_pinned_memory_on_a_stream_of_their_own(
    features, float8: Path, monkeypatch: pytest.MonkeyPatch, states: str, copies: int
) -> None:
    log: list[Any] = []
    side, main = FakeStream(log), FakeStream(log)
    own = threading.local()  # the stream that a thread has entered
    empty, to = torch.empty, Tensor.to
    pinned: set[int] = set()

    @contextlib.contextmanager
    def enter(stream: FakeStream) -> Iterator[None]:
        own.stream = stream
        yield
        own.stream = None

    def make(*shape: int, pin_memory: bool = False, **more: Any) -> Tensor:
        made = empty(*shape, **more)
        if pin_memory:
            pinned.add(made.data_ptr())
        return made

    def copy(tensor: Tensor, *where: Any, **how: Any) -> Tensor:
        if how.pop("non_blocking", False):
            assert where == (GPU,) and own.stream is side and tensor.data_ptr() in pinned
            log.append("copy")
            return tensor.clone()
        return to(tensor, *where, **how)

    def note(*states: Any) -> Any:
        if getattr(own, "stream", None) is not None:
            log.append("expand")
        return expand(*states)

    monkeypatch.setattr(batches_module, "expand", note)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch, "empty", make)
    monkeypatch.setattr(Tensor, "to", copy)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: log.append(("used by", stream)))
    source = open_for(features, GPU, float8 if states == "float8" else features.store)
    for device in (GPU, CPU):
        log.clear()
        found = list(open_feed(features, source, device).held_out())
        sent = [*["copy"] * copies, *["expand"] * (copies - 5), "copied", ("wait", "arrival")]
        sent += [("used by", main)] * 5
        assert log == (sent * len(found) if device is GPU else [])
    with open_feed(features, source, GPU).open(Position()) as steps:
        _, batches = next(steps)
        assert ("wait", "arrival") in log
    expected = all_batches(features, source)
    assert all(same(ours, theirs) for ours, theirs in zip(batches, expected, strict=False))
    source.close()
