"""A plugin for the test server: lists what makes the host wait for the device in decode rounds, if there were one.

On a CPU nothing waits, so what would is named by what Python asks of tensors: their values (tolist, item, bool, ...),
shapes that depend on values, and tensors made of Python lists, whose copy to a device comes from pageable memory. The
step that builds a grammar's mask is the engine's and waits by design, after the target's forward was launched.

The report goes to the file that EAGLE_TEST_WAITS names: rounds by kind of request, and findings.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import broken_verifier
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_plugin.runtime.graph_emulator import DATA_SHAPED

aten = torch.ops.aten
READS = {
    getattr(torch.Tensor, name)
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__")
}
COPIES = {torch.tensor, torch.as_tensor, torch.from_numpy}
BY_DESIGN = {
    "build_grammar_vocab_mask",
    "update_async_output_token_ids",  # vLLM's: the tokens of the step before, for penalties
    "to_device",  # these two copy from pinned memory on a GPU (runtime/host_to_device.py)
    "values_to_device",
    "without_spare_places",  # of a CPU's tensors only (runtime/accept.py)
}
ENGINES = ("/eagle_plugin/", "/sglang/", "/vllm/")


def caller() -> str | None:
    """The innermost line of the plugin or the engine; None inside a step that waits by design."""
    line, frame = "", sys._getframe(3)  # after note() and the mode
    while frame is not None:
        if frame.f_code.co_name in BY_DESIGN:
            return None
        name = frame.f_code.co_filename
        if not line and (any(part in name for part in ENGINES) or name.endswith("host_waits.py")):
            line = f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return line


class Findings(collections.Counter[str]):
    """What would wait, by what and where."""

    def note(self, what: str) -> None:
        place = caller()
        if place is not None:
            self[f"{what} at {place}"] += 1


class Functions(TorchFunctionMode):
    def __init__(self, findings: Findings) -> None:
        super().__init__()
        self._findings = findings

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self._findings.note(f"the host reads a value: {func.__name__}")
        if func in COPIES and not isinstance(args[0], torch.Tensor):
            self._findings.note("a Python list becomes a tensor")
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self, findings: Findings) -> None:
        super().__init__()
        self._findings = findings

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = func is aten.index.Tensor and any(x is not None and x.dtype == torch.bool for x in args[1])
        if masks or func in DATA_SHAPED or func is aten._local_scalar_dense.default:
            self._findings.note(f"the result's shape or value is needed on the host: {func}")
        return func(*args, **(kwargs or {}))


class Guard:
    """Around `TreeWorker.forward_batch_generation`."""

    def __init__(self, report: Path) -> None:
        self._report, self._findings, self._rounds = report, Findings(), collections.Counter[str]()

    def run(self, forward: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return forward(batch, *args, **kwargs)
        with Functions(self._findings), Operations(self._findings):
            result = forward(batch, *args, **kwargs)
        self._rounds.update(kinds(batch))
        scratch = self._report.with_suffix(".part")
        scratch.write_text(json.dumps({"rounds": self._rounds, "findings": self._findings}))
        scratch.replace(self._report)
        return result


def kinds(batch: Any) -> list[str]:
    """What the requests of a round ask for."""
    from eagle_plugin.sglang.penalties import penalised

    info = batch.sampling_info
    has = {
        "greedy": info.is_all_greedy,
        "sampled": not info.is_all_greedy,
        "penalised": penalised(batch),
        "grammar": batch.has_grammar,
        "biased": info.logit_bias is not None,
        "log probabilities": batch.return_logprob,
    }
    return ["any", *(kind for kind, asked in has.items() if asked)]


def register() -> None:
    """Entry point ``sglang.srt.plugins``."""
    from eagle_plugin.sglang import support

    guard = Guard(Path(os.environ["EAGLE_TEST_WAITS"]))
    factory = support.worker_factory

    def guarded_factory(*names: Any) -> Any:
        create = factory(*names)

        def created(**arguments: Any) -> Any:
            worker = create(**arguments)
            if os.environ.get("EAGLE_TEST_WAITS_CONTROL"):
                plant(worker)
            worker.forward_batch_generation = functools.partial(guard.run, worker.forward_batch_generation)
            return worker

        return created

    support.worker_factory = guarded_factory


def plant(worker: Any) -> None:
    """The control: a round that reads one value on the host."""
    forward = worker.forward_batch_generation

    def waiting(batch: Any, *args: Any, **kwargs: Any) -> Any:
        assert int(batch.seq_lens[0]) > 0
        return forward(batch, *args, **kwargs)

    worker.forward_batch_generation = waiting


def install(folder: Path) -> dict[str, str]:
    """Write the entry point into `folder`; returns the environment of the server."""
    return broken_verifier.install(folder, "host_waits") | {"EAGLE_TEST_WAITS": str(folder / "waits.json")}
