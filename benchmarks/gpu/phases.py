"""The phases of a round as things to replay: captured as CUDA graphs, by the graph emulator on a CPU, or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.decoding import PlainDecoder, TreeDecoder
from benchmarks.gpu.steps import Setting
from eagle_plugin.core.verify import Accepted
from eagle_plugin.runtime.graph_emulator import EmulatedCapturer, recording_launches
from eagle_plugin.runtime.graphs import Capturer, CudaCapturer, Graph

NAMES = ("draft", "verify", "tail", "extend")


@contextmanager
def capturing(setting: Setting) -> Iterator[Callable[[], Capturer]]:
    """What makes capturers on this device: that of SGLang's worker, or the emulator of graphs on a CPU.

    One capturer is for graphs that live and die together: they share their memory.
    """
    if setting.on_gpu:
        default, side = torch.cuda.current_stream(setting.device), torch.cuda.Stream(setting.device)
        side.wait_stream(default)
        with torch.cuda.stream(side):  # the default stream cannot be captured
            yield CudaCapturer
        default.wait_stream(side)
        return
    with recording_launches():
        yield EmulatedCapturer


class Replay:
    """A function without arguments; `out` is the result of the last call, after a capture always in the same memory."""

    def __init__(self, call: Callable[[], Any], capturer: Capturer | None) -> None:
        self._call = call
        self._graph: Graph | None = None
        if capturer is None:
            self.out = call()
        else:
            self._graph, self.out = capturer.capture(call)

    def __call__(self) -> Any:
        """Run once more, on what the memory of the function's inputs holds now."""
        if self._graph is None:
            self.out = self._call()
        else:
            self._graph.replay()
        return self.out


class State:
    """The tensors of a decoder that a round changes, the caches left out: what lies after L in them is never read."""

    def __init__(self, decoder: PlainDecoder) -> None:
        self._tensors = [decoder.lengths, decoder.roots]
        if isinstance(decoder, TreeDecoder):
            self._tensors += [*decoder.state.top, decoder.state.hidden]
        self._saved = [tensor.clone() for tensor in self._tensors]

    def restore(self) -> None:
        """Give the decoder the state that it had when this was made."""
        for tensor, saved in zip(self._tensors, self._saved, strict=True):
            tensor.copy_(saved)


class Round:
    """The four phases of a decoder, each with the outputs of the phase before as its inputs; None captures nothing."""

    def __init__(self, decoder: TreeDecoder, capturer: Capturer | None) -> None:
        before = State(decoder)
        self.draft = Replay(decoder.draft, capturer)
        self.verify = Replay(lambda: decoder.verify(self.draft.out), capturer)
        self.tail = Replay(lambda: decoder.tail(self.draft.out, self.verify.out), capturer)
        self.extend = Replay(lambda: decoder.extend(self.tail.out), capturer)
        before.restore()

    def __call__(self) -> Accepted:
        """One round."""
        for replay in self.phases().values():
            replay()
        accepted: Accepted = self.tail.out.accepted
        return accepted

    def phases(self) -> dict[str, Replay]:
        """By name, in their order."""
        return {name: getattr(self, name) for name in NAMES}


def milliseconds(calls: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Make all calls in their order, `repeats` times over; the time of each call of each repeat."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    if device.type != "cuda":
        for _ in range(repeats):
            for name, call in calls.items():
                started = time.perf_counter()
                call()
                times[name].append(1e3 * (time.perf_counter() - started))
        return times
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)] for _ in range(repeats)]
    for row in marks:
        row[0].record()
        for mark, call in zip(row[1:], calls.values(), strict=True):
            call()
            mark.record()
    torch.cuda.synchronize(device)
    for row in marks:
        for name, start, end in zip(calls, row, row[1:], strict=False):
            times[name].append(start.elapsed_time(end))
    return times


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of a phase's result."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def differences(found: Any, wanted: Any, tolerance: float) -> list[str]:
    """What differs between two results of a phase: integers must be equal, floats close."""
    wrong = []
    for i, (x, y) in enumerate(zip(tensors_of(found), tensors_of(wanted), strict=True)):
        if x.shape != y.shape or x.dtype != y.dtype:
            wrong.append(f"tensor {i} is {x.dtype} {list(x.shape)}, wanted {y.dtype} {list(y.shape)}")
        elif x.is_floating_point():
            same = torch.isclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
            if not bool(same.all()):
                at = (~same).nonzero()[0].tolist()
                wrong.append(f"tensor {i} has {float(x[tuple(at)]):.6g} at {at}, wanted {float(y[tuple(at)]):.6g}")
        elif not torch.equal(x, y):
            at = (x != y).nonzero()[0].tolist()
            wrong.append(f"tensor {i} has {int(x[tuple(at)])} at {at}, wanted {int(y[tuple(at)])}")
    return wrong
