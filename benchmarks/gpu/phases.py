"""The phases of a round as things to replay: CUDA graphs on a GPU, the functions themselves elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.decoding import PlainDecoder, TreeDecoder

NAMES = ("draft", "verify", "tail", "extend")
WARM_CALLS = 3  # before a capture: they compile and plan


class Replay:
    """A function without arguments; `out` is the result of the last call, after a capture always in the same memory."""

    def __init__(self, call: Callable[[], Any], device: torch.device) -> None:
        self._call, self._graph, self.device = call, None, device
        if device.type != "cuda":
            self.out = call()
            return
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_CALLS):
                call()
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.out = call()

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
    """The four phases of a decoder, each captured with the outputs of the phase before as its inputs."""

    def __init__(self, decoder: TreeDecoder) -> None:
        before, device = State(decoder), decoder.target.device
        self.draft = Replay(decoder.draft, device)
        self.verify = Replay(lambda: decoder.verify(self.draft.out), device)
        self.tail = Replay(lambda: decoder.tail(self.draft.out, self.verify.out), device)
        self.extend = Replay(lambda: decoder.extend(self.tail.out), device)
        before.restore()

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
