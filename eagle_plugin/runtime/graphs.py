"""Captures functions over static memory as CUDA graphs, once per key, and replays them in every later round.

A function that is captured reads and writes only memory that keeps its address, and its result depends on nothing else:
no value that the host computes from a batch, no tensor that Python keeps from an earlier call. What it returns lies in
memory of the graph, which the next replay overwrites: a caller that hands a result on clones it.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from eagle_plugin.common.device_memory import is_out_of_memory
from eagle_plugin.runtime.ranks import RankMissing

T = TypeVar("T")
Fields = TypeVar("Fields", bound=NamedTuple)
WARM_UP_CALLS = 2  # before a capture: Triton compiles and libraries make their handles, which a capture forbids
MOST_PADDING = 16  # times the requests of a batch
FEW = 32  # requests whose rows take about as long as those of one, which is the reading of the weights
WARM_UP_SECONDS = 300.0  # that they may take


class Graph(Protocol):
    """One captured function."""

    def replay(self) -> None:
        """Run it again on what its memory holds now."""
        ...


class Capturer(Protocol):
    """Makes graphs: CUDA's (`CudaCapturer`), or those of `graph_emulator` on a CPU."""

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        """Run `function` once and record what it does; the graph, and the function's result."""
        ...


class CudaCapturer:
    """CUDA graphs that share one memory pool.

    A result of one is kept alive, so that none captured later overwrites it. One captured earlier may have used the
    same memory, and writes there again: a result is to be read before a graph that was captured earlier is replayed.
    """

    def __init__(self) -> None:
        # torch asserts that a pool which it is given is in use; one that is not gives its memory back.
        self._living: weakref.WeakSet[Any] = weakref.WeakSet()

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        """To be called with a stream other than the default one as the current one.

        Raises:
            torch.OutOfMemoryError: also where it is the driver that has no memory left, or where the end of the capture
                fails because of it.
            RankMissing: the calls before it do not end.
        """
        try:
            for _ in range(WARM_UP_CALLS):
                function()
            _wait_for_warm_up()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool(), stream=torch.cuda.current_stream()):
                result = function()
        except RuntimeError as error:
            # Ending the capture that memory ran out in can fail too, and would hide why.
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            if is_out_of_memory(error) and not isinstance(error, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        self._living.add(graph)
        return graph, result

    def _pool(self) -> Any:
        return next((graph.pool() for graph in self._living), None)


def _wait_for_warm_up() -> None:
    """Wait for the calls before a capture. With several ranks they can wait for one that had no memory for its call."""
    end, until = torch.cuda.Event(), time.monotonic() + WARM_UP_SECONDS
    end.record()
    while not end.query():
        if time.monotonic() > until:
            raise RankMissing(
                f"eagle-plugin: a call before the capture of CUDA graphs has not ended after {WARM_UP_SECONDS:.0f} s; "
                "another rank may have run out of GPU memory: leave more of it free (--mem-fraction-static in SGLang, "
                "--gpu-memory-utilization in vLLM)"
            )
        time.sleep(0.001)


class CapturedFunctions:
    """The captured functions of one worker, by key; a key that was not captured runs as it is."""

    def __init__(self) -> None:
        self._captured: dict[Hashable, tuple[Graph, Any]] = {}
        self.replays = 0  # since the start

    def capture(self, capturer: Capturer, key: Hashable, function: Callable[[], T]) -> T:
        """Capture `function` under this key; its result, as a replay will leave it."""
        graph, result = capturer.capture(function)
        self._captured[key] = graph, result
        return result

    def run(self, key: Hashable, function: Callable[[], T]) -> T:
        """Replay what was captured under this key, else call `function`."""
        captured = self._captured.get(key)
        if captured is None:
            return function()
        graph, result = captured
        graph.replay()
        self.replays += 1
        return result  # type: ignore[no-any-return]

    def clear(self) -> None:
        """Forget what was captured."""
        self._captured.clear()

    def forget(self, is_meant: Callable[[Any], bool]) -> None:
        """Forget what was captured under the keys that are meant."""
        for key in [key for key in self._captured if is_meant(key)]:
            del self._captured[key]

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured


class StaticMemory:
    """Named memory of fixed address, which carries values into captured functions and from one to the next.

    Every name is one flat allocation, so that a view of any batch size begins at the same address and is contiguous.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._flat: dict[str, Tensor] = {}

    def allocate(self, name: str, numel: int, dtype: torch.dtype, fill: int = 0) -> None:
        """Memory for up to `numel` values."""
        self._flat[name] = torch.full((numel,), fill, dtype=dtype, device=self._device)

    def adopt(self, name: str, memory: Tensor) -> None:
        """Use this contiguous memory, which somebody else keeps at its address."""
        self._flat[name] = memory.view(-1)

    def view(self, name: str, *shape: int) -> Tensor:
        """The first values under this name, as a tensor of this shape."""
        return self._flat[name][: math.prod(shape)].view(shape)

    def put(self, name: str, value: Tensor) -> Tensor:
        """Copy a tensor into the memory of this name; the view that holds it now."""
        return self.view(name, *value.shape).copy_(value)

    def allocate_rows(self, name: str, rows: int, like: Tensor) -> None:
        """Memory for up to `rows` rows as that of `like` [1, ...]."""
        self.allocate(name, rows * like[0].numel(), like.dtype)

    def allocate_fields(self, name: str, values: Fields) -> None:
        """Memory for the tensors of a named tuple, which it holds now; that of field F has the name NAME.F."""
        for field, x in values._asdict().items():
            self._flat[f"{name}.{field}"] = x.flatten().clone()

    def view_fields(self, name: str, kind: type[Fields], *shape: int) -> Fields:
        """The named tuple of this kind under this name; every field has this shape."""
        return kind._make(self.view(f"{name}.{field}", *shape) for field in kind._fields)

    def put_fields(self, name: str, values: Fields) -> Fields:
        """`put` every tensor of a named tuple; that of field F has the name NAME.F."""
        return values._make(self.put(f"{name}.{field}", x) for field, x in values._asdict().items())

    def holds(self, name: str, value: Tensor) -> bool:
        """Whether `value` is a view of the memory of this name."""
        return value.untyped_storage()._cdata == self._flat[name].untyped_storage()._cdata  # type: ignore[no-any-return]


class Buckets:
    """The batch sizes that functions are captured for; a batch is padded to the next one."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sorted(set(sizes))

    def __iter__(self) -> Iterator[int]:
        return iter(reversed(self._sizes))  # the largest first: smaller graphs then fit into memory that it freed

    def of(self, b: int) -> int | None:
        """The smallest size that holds b requests; None if all are smaller, or so large that padding costs more than
        a round without a graph."""
        return next((size for size in self._sizes if b <= size <= max(b * MOST_PADDING, FEW)), None)

    def __contains__(self, size: int) -> bool:
        return size in self._sizes

    def drop(self, size: int) -> None:
        """Capture no more for this size."""
        self._sizes.remove(size)
