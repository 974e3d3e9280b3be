"""What a decode round costs the host: launches by phase, and time by phase with the kernels' own work left out.

On a GPU the host only launches: every torch operation that computes and every native kernel is one launch. On a CPU the
same calls also do the work. `Probe` counts the launches, and runs the native kernels outside its clock: in place of
each, the clock sees a call of a tvm-ffi function that does nothing, with the same arguments.
"""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tvm_ffi import testing

from eagle_plugin.common.errors import UserError
from eagle_plugin.kernels import loader

OURS, ENGINE, OTHER = "ours", "engine", "other"
# Operations that compute nothing: they allocate, or name the same memory again.
FREE = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"}
FREE |= {"_unsafe_view", "_reshape_alias", "is_pinned"}
# Operations that are two kernels on a GPU: a fill and a copy, or a copy and a fill.
TWO_KERNELS = {"constant_pad_nd", "masked_fill", "scatter", "index_put"}
GRAPH = "graph launch"
ENGINE_FOLDERS = ("/sglang/", "/eagle_sglang_cpu/", "/sgl_kernel/", "/site-packages/vllm/")


class Launch(NamedTuple):
    """Launches that are alike."""

    phase: str
    whose: str  # OURS, ENGINE or OTHER: the code that asked for it
    name: str  # of the operation; native kernels begin with "native "


class Probe:
    """Times and counts one round at a time; everything between `begin_round` and `end_round` belongs to a phase."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        """clock: in nanoseconds; `time.thread_time_ns` leaves out what other processes take."""
        self._clock = clock
        self.launches: collections.Counter[Launch] = collections.Counter()
        self.phases: dict[str, int] = {}  # nanoseconds
        self._phase: str | None = None  # None: outside of a round
        self._since = 0
        self._left_out = 0  # nanoseconds since _since that count for no phase

    @property
    def in_round(self) -> bool:
        """Whether a round has begun and not ended."""
        return self._phase is not None

    def begin_round(self, phase: str) -> None:
        """Forget the round before and start a phase."""
        self.launches, self.phases = collections.Counter(), {}
        self._start(phase)

    def enter(self, phase: str) -> None:
        """End the phase before and start this one; nothing happens outside of a round."""
        if self._phase is not None:
            self._stop()
            self._start(phase)

    def end_round(self) -> None:
        """End the last phase of the round."""
        self._stop()
        self._phase = None

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What runs in the block takes no time, and its launches are not counted."""
        phase, started = self._phase, self._clock()
        self._phase = None
        try:
            yield
        finally:
            self._phase = phase
            self._left_out += self._clock() - started

    @contextmanager
    def as_graph(self, name: str) -> Iterator[None]:
        """What runs in the block is one launch of a captured graph."""
        self.count(f"{GRAPH} {name}", OURS)
        with self.left_out():
            yield

    def count(self, name: str, whose: str | None = None, number: int = 1) -> None:
        """Count a launch of the running phase; without `whose`, the calling code decides whose it is."""
        if self._phase is not None:
            self.launches[Launch(self._phase, whose or owner(sys._getframe(1)), name)] += number

    @contextmanager
    def native_kernels(self) -> Iterator[None]:
        """Inside the block native kernels run outside the clock, and each call counts as a launch."""
        load = loader.load
        loader.load = lambda kind="cpu": _Library(load(kind), self)  # type: ignore[assignment]
        loader.function.cache_clear()
        try:
            yield
        finally:
            loader.load = load
            loader.function.cache_clear()

    def _start(self, phase: str) -> None:
        self._phase, self._left_out = phase, 0
        self.phases.setdefault(phase, 0)
        self._since = self._clock()

    def _stop(self) -> None:
        assert self._phase is not None, "no round has begun"
        self.phases[self._phase] += self._clock() - self._since - self._left_out


class _Library:
    """A native library whose kernels run outside the clock of a probe."""

    def __init__(self, module: Any, probe: Probe) -> None:
        if module is None:
            raise UserError("there are no native kernels, wanted them: unset EAGLE_KERNELS, or install a compiler")
        self._module, self._probe = module, probe

    def get_function(self, name: str) -> Callable[..., None]:
        kernel, probe, nothing = self._module.get_function(name), self._probe, testing.nop

        def launch(*arguments: Any) -> None:
            probe.count(f"native {name}", OURS)
            with probe.left_out():
                kernel(*arguments)
            nothing(*arguments)

        return launch


class CountLaunches(TorchDispatchMode):
    """Counts the torch operations of a probe's rounds. It slows every operation: do not time rounds inside it."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self._probe = probe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if number := kernels_of(func, out):
            self._probe.count(operation(func), owner(sys._getframe(1)), number)
        return out


def operation(func: Any) -> str:
    """The name of a torch operation without its overload: "index_put_"."""
    return str(func._schema.name).split("::")[-1]


def kernels_of(func: Any, out: Any) -> int:
    """How many kernels a torch operation launches on a GPU; `out` is its result."""
    name = operation(func)
    computes = func._schema.is_mutable or any(isinstance(x, torch.Tensor) for x in tree_leaves(out))
    if func.is_view or name in FREE or not computes:
        return 0
    return 2 if name in TWO_KERNELS else 1


def owner(frame: FrameType | None) -> str:
    """Whose code asked for an operation: that of the innermost frame which is in the plugin or in the engine."""
    while frame is not None:
        file = frame.f_code.co_filename
        if "/eagle_plugin/" in file:
            return OURS
        if any(folder in file for folder in ENGINE_FOLDERS):
            return ENGINE
        frame = frame.f_back
    return OTHER
