"""CUDA graphs on a CPU: what one call does to tensors is recorded with their very memory, and run again at a replay.

As in a real capture, what the host computes during the capture is a constant of the graph; only torch operations and
native kernels are recorded, with fixed inputs and outputs. Before a replay all memory that the capture allocated is
filled with garbage, results too, and after it all but the results: a function that depends on an old value, on a value
that Python kept, or on memory of the graph that was never written gives garbage. The graphs of one capturer share their
memory: what a graph no longer needed when it was captured may be that of the graphs captured after it. So a replay also
fills the results of all of those with garbage.

Not emulated: work that runs later than the host, reuse of memory inside one graph, limits of kernel launches, Triton,
NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle_plugin.kernels import loader
from eagle_plugin.runtime.graphs import Graph

T = TypeVar("T")
GARBAGE = 0x7F  # a byte: huge integers, huge floats, no NaN
NO_OPERATORS: Mapping[Any, Callable[..., Any]] = {}
_recording: list[EmulatedGraph] = []
aten = torch.ops.aten
# The shapes of their results depend on values, which the host would have to wait for.
DATA_SHAPED = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}


class CaptureError(RuntimeError):
    """The function cannot be captured: CUDA would refuse it too."""


class EmulatedGraph(TorchDispatchMode):
    """One captured function."""

    def __init__(self, transparent: Mapping[Any, Callable[..., Any]] = NO_OPERATORS) -> None:
        super().__init__()
        self._transparent = transparent
        self._nodes: list[tuple[Callable[..., Any], Any, dict[str, Any], Any]] = []
        self._own: dict[int, Tensor] = {}  # by address: one tensor of each memory that the capture allocated
        self._scratch: list[Tensor] = []
        self._results: list[Tensor] = []
        self._has_results = False  # since the last replay; a replay of an earlier graph takes them away
        self._later: list[EmulatedGraph] = []  # captured later, into the same memory

    def share_memory(self, later: EmulatedGraph) -> None:
        """That graph was captured into memory that this one has used."""
        self._later.append(later)

    def record_native(self, kernel: Callable[..., Any], arguments: Any) -> None:
        """One launch of a native kernel."""
        self._nodes.append((kernel, arguments, {}, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._transparent:
            with self:
                return self._transparent[func](*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            raise CaptureError("a value of a tensor is read by the host inside a captured function")
        if func in DATA_SHAPED or func is aten.index.Tensor and any(_is_mask(x) for x in args[1]):
            raise CaptureError(f"the shape of a tensor depends on values inside a captured function: {func}")
        out = func(*args, **kwargs)
        given = {_memory(x) for x in _tensors(args, kwargs)}
        # In inference mode what may be a view comes as it was called: reshape, to, contiguous, which can copy too.
        if func.is_view and all(_memory(x) in given for x in _tensors(out)):
            return out
        for x in _tensors(out):
            if _memory(x) not in given and x.untyped_storage().nbytes():
                self._own[_memory(x)] = x
        self._nodes.append((func, args, kwargs, out))
        return out

    def keep_results(self, result: Any) -> None:
        """To be called after the capture: what the function returned outlives a replay."""
        kept = {_memory(x) for x in _tensors(result)}
        self._scratch = [x for at, x in self._own.items() if at not in kept]
        self._results = [x for at, x in self._own.items() if at in kept]
        self._has_results = True

    def replay(self) -> None:
        """Run all nodes again."""
        _spoil(list(self._own.values()))
        for graph in self._later:
            if graph._has_results:
                _spoil(graph._results)
                graph._has_results = False
        for func, args, kwargs, out in self._nodes:
            again = func(*args, **kwargs)
            _wait(again)
            if out is None:
                continue
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        _spoil(self._scratch)
        self._has_results = True


class EmulatedCapturer:
    """Makes emulated graphs. `install` must have been called before the first native kernel was looked up."""

    def __init__(self, transparent: Mapping[Any, Callable[..., Any]] = NO_OPERATORS) -> None:
        """transparent: operators written in Python, with their functions, which read what holds for one call only.

        What is captured is what they launch, as on a GPU, and not the call.
        """
        self._transparent = transparent
        self._graphs: list[EmulatedGraph] = []

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        """Run `function` once and record it; CaptureError where CUDA would refuse it."""
        graph = EmulatedGraph(self._transparent)
        _recording.append(graph)
        try:
            with graph:
                result = function()
        finally:
            _recording.pop()
        graph.keep_results(result)
        for earlier in self._graphs:
            earlier.share_memory(graph)
        self._graphs.append(graph)
        return graph, result


class RecordingModule:
    """A native library whose launches are seen by the capture in progress."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def get_function(self, name: str) -> Callable[..., Any]:
        """The native function of this name."""
        kernel = self._module.get_function(name)

        def launch(*arguments: Any) -> Any:
            if _recording:
                _recording[-1].record_native(kernel, arguments)
            return kernel(*arguments)

        return launch


def install() -> None:
    """Let captures see the launches of native kernels, of every library that is opened from now on."""
    loader.wrap_module = RecordingModule
    loader.open_library.cache_clear()
    loader.function.cache_clear()


@contextmanager
def recording_launches() -> Iterator[None]:
    """`install` for the block only; what it finds installed stays so."""
    before = loader.wrap_module
    install()
    try:
        yield
    finally:
        loader.wrap_module = before
        loader.open_library.cache_clear()
        loader.function.cache_clear()


def _tensors(*trees: Any) -> list[Tensor]:
    return [x for x in tree_leaves(trees) if isinstance(x, Tensor)]


def _wait(result: Any) -> None:
    """A collective operation of torch.distributed on CPU tensors runs in another thread; its result says when it ended.

    Outside of a capture torch.distributed waits for it, in Python, where no operation is seen.
    """
    for work in tree_leaves(result):
        if isinstance(work, torch.ScriptObject):
            work.wait()  # type: ignore[attr-defined]


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata  # type: ignore[no-any-return]


def _spoil(tensors: list[Tensor]) -> None:
    for x in tensors:
        torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).fill_(GARBAGE)
