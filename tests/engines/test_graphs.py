"""Static memory, batch sizes, what CUDA's capturer makes of memory that runs out, and what the emulator records."""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle_plugin.runtime import graphs
from eagle_plugin.runtime.graph_emulator import EmulatedCapturer
from eagle_plugin.runtime.graph_memory import GraphMemory
from eagle_plugin.runtime.graphs import Buckets, CapturedFunctions, CudaCapturer, StaticMemory
from eagle_plugin.runtime.ranks import RankMissing


def test_views_of_any_size_begin_at_one_address() -> None:
    memory = StaticMemory("cpu")
    memory.allocate("tokens", 12, torch.int64, 7)
    whole, part = memory.view("tokens", 3, 4), memory.view("tokens", 2, 3)
    assert whole.data_ptr() == part.data_ptr() and part.is_contiguous() and whole.nbytes == 12 * 8
    stored = memory.put("tokens", torch.arange(6).view(2, 3))
    assert whole.flatten().tolist() == [0, 1, 2, 3, 4, 5, *[7] * 6]
    assert memory.holds("tokens", stored) and not memory.holds("tokens", stored.clone())


def test_a_batch_goes_to_the_next_size() -> None:
    buckets = Buckets([4, 1, 2, 4])
    assert [buckets.of(b) for b in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, None]
    assert list(buckets) == [4, 2, 1]
    buckets.drop(4)
    assert buckets.of(3) is None and 4 not in buckets and 2 in buckets


def test_what_was_not_captured_runs_as_it_is() -> None:
    functions = CapturedFunctions()
    assert functions.run("key", lambda: 5) == 5 and not functions.replays
    replayed: list[str] = []
    graph = SimpleNamespace(replay=lambda: replayed.append("once"))
    capturer = SimpleNamespace(capture=lambda function: (graph, function()))
    assert functions.capture(capturer, "key", lambda: 6) == 6  # type: ignore[arg-type]
    assert functions.run("key", lambda: 7) == 6 and replayed == ["once"] and functions.replays == 1


def test_graphs_share_the_pool_of_those_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asserts that a pool is in use: all graphs of the largest batch size may be dropped before the next size is
    captured. Then the memory of that pool is free."""
    living, pools = weakref.WeakSet[Any](), list[Any]()

    class Graph:
        def __init__(self) -> None:
            living.add(self)

        def pool(self) -> str:
            return "pool"

    def graph(_: Any, *, pool: Any, stream: Any) -> Any:
        assert (pool is None) == (len(living) == 1), "whether a graph beside this one uses the pool"
        pools.append(pool)
        return contextlib.nullcontext()

    ended = SimpleNamespace(record=lambda: None, query=lambda: True)
    for name, value in {"graph": graph, "CUDAGraph": Graph, "Event": lambda: ended, "current_stream": int}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    capturer, functions = CudaCapturer(), CapturedFunctions()
    for size in (8, 4, 2):
        functions.capture(capturer, ("draft", size), lambda: 1)
        functions.capture(capturer, ("walk", size), lambda: 1)
        functions.forget(lambda key: key[1] == 8 or key == ("draft", 4))
    assert pools == [None, "pool", None, "pool", "pool", "pool"] and len(functions) == 3


@pytest.mark.parametrize("ends", [False, True], ids=["the end of the capture fails", "the capture ends"])
def test_memory_that_runs_out_in_a_capture_is_named(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    @contextlib.contextmanager
    def capture(*_: Any, **__: Any) -> Any:
        try:
            yield
        except RuntimeError:
            if ends:
                raise
            raise RuntimeError("the capture was invalidated")  # noqa: B904

    ended = SimpleNamespace(record=lambda: None, query=lambda: True)
    stubs = {"graph": capture, "CUDAGraph": object, "Event": lambda: ended, "current_stream": int}
    for name, value in stubs.items():
        monkeypatch.setattr(torch.cuda, name, value)
    calls: list[int] = []

    def function() -> None:
        calls.append(1)
        if len(calls) > 2:  # the warm-up went well
            raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        CudaCapturer().capture(function)

    def launch() -> None:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    with pytest.raises(torch.OutOfMemoryError, match="Triton"):  # the driver's, in a warm-up
        CudaCapturer().capture(launch)
    ended.query = lambda: False  # a rank that waits for another one
    monkeypatch.setattr(graphs, "WARM_UP_SECONDS", 0.01)
    buckets = Buckets([1, 2])
    with (
        pytest.raises(RankMissing, match="another rank may have run out of GPU memory"),
        GraphMemory().tried(buckets, 2),
    ):
        CudaCapturer().capture(lambda: None)
    assert 2 in buckets, "the other ranks do not know that it is left out"


def test_a_replay_may_write_over_what_later_captures_left() -> None:
    """What a graph no longer needs when it is captured is free for those after it."""
    capturer, given = EmulatedCapturer(), torch.arange(4)
    first, one = capturer.capture(lambda: given + 1)
    second, two = capturer.capture(lambda: given * 2)
    first.replay()
    second.replay()
    assert one.tolist() == [1, 2, 3, 4] and two.tolist() == [0, 2, 4, 6]
    first.replay()
    assert one.tolist() == [1, 2, 3, 4] and two.tolist() != [0, 2, 4, 6]


@pytest.mark.parametrize("inference", [False, True])
def test_copies_of_what_may_be_a_view_are_emulated(inference: bool) -> None:
    """In inference mode they come as what was called, by the schema of a view."""
    with torch.inference_mode(inference):
        given = torch.arange(6).view(2, 3)

        def function() -> tuple[torch.Tensor, ...]:
            return given.float(), given.t().reshape(-1), given.t().contiguous(), given.view(-1) + 0

        graph, results = EmulatedCapturer().capture(function)
        given.mul_(10)
        graph.replay()
        for found, wanted in zip(results, function(), strict=True):
            assert torch.equal(found, wanted)


def test_the_emulator_sees_into_an_operator_that_reads_its_caller() -> None:
    """As attention in vLLM, which finds its metadata in the context of one forward."""
    context = [torch.ones(3)]

    def add_context(x: torch.Tensor) -> torch.Tensor:
        return x + context[0]

    with torch.library._scoped_library("eagle_test", "FRAGMENT") as library:
        library.define("add_context(Tensor x) -> Tensor")
        library.impl("add_context", add_context, "CPU")
        operator, given = torch.ops.eagle_test.add_context.default, torch.ones(3)
        graphs = [EmulatedCapturer(seen).capture(lambda: operator(given)) for seen in ({operator: add_context}, {})]
        context.clear()
        (graph, result), (opaque, _) = graphs
        given.fill_(5)
        graph.replay()
        assert result.tolist() == [6, 6, 6]
        with pytest.raises(IndexError):
            opaque.replay()
