"""The engines of step `text`, how each is started, and what all of them are asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import model_cases
from benchmarks.gpu.model_cases import CHAIN, FIXED, TREE, sglang_arguments
from eagle_plugin.core.shape import Shape

LARGEST_GRAPH = 8  # batches of more requests run without graphs


class Case(NamedTuple):
    """How an engine is started."""

    what: str
    plugin: bool
    shape: Shape | None  # None: plain decoding
    graphs: bool = True
    overlap: bool = True

    @property
    def started(self) -> model_cases.Case:
        """As the cases of step `model`."""
        return model_cases.Case(self.what, self.plugin, self.shape, "float32", FIXED)


CASES = {
    "plain": Case("plain decoding", False, None),
    "eager": Case("the plugin without graphs and overlap", True, TREE, graphs=False, overlap=False),
    "graphs": Case("the plugin with graphs", True, TREE, overlap=False),
    "overlap": Case("the plugin with graphs and overlap", True, TREE),
    "chain": Case("the plugin with chains, graphs and overlap", True, CHAIN),
    "engine": Case("SGLang's own EAGLE-3 with graphs and overlap", False, TREE),
}


class Ask(NamedTuple):
    """Requests that are sent at the same time."""

    prompts: list[list[int]]
    parameters: list[dict[str, Any]]
    text_is_plain: bool = True  # greedy, so that its text is that of plain decoding


def prompt(number: int, length: int) -> list[int]:
    """Token ids that are not special, another start for each number."""
    return [40 + (number * 37 + i * (7 + number % 5) + i * i % 11) % 200 for i in range(length)]


def asks(tiny: bool) -> Iterator[tuple[str, Ask]]:
    """Batches below, at and above the captured sizes; long prompts; a bias; seeds; and two that are timed."""
    part = 4 if tiny else 1

    def greedy(tokens: int, **more: Any) -> dict[str, Any]:
        return {"temperature": 0, "ignore_eos": True, "tokens": max(tokens // part, 8), **more}

    yield "warm-up", Ask([prompt(i, 5 + i) for i in range(8)], [greedy(32)] * 8)
    yield "alone", Ask([prompt(20, 9)], [greedy(128)])
    yield "eight", Ask([prompt(i, 4 + 9 * i) for i in range(8)], [greedy(96)] * 8)
    yield "uneven", Ask([prompt(30 + i, 3 + 5 * i) for i in range(10)], [greedy(64 + 7 * i) for i in range(10)])
    yield "twelve", Ask([prompt(50 + i, 6 + i) for i in range(12)], [greedy(64)] * 12)
    yield "long", Ask([prompt(70 + i, 260 + 31 * i) for i in range(4)], [greedy(64)] * 4)
    bias = {"logit_bias": {"70": 3.0, "90": -50.0}}
    yield "bias", Ask([prompt(85 + i, 6 + i) for i in range(4)], [greedy(40, **bias)] * 4)
    seeded = [greedy(48, temperature=1.0, sampling_seed=i) for i in range(8)]
    yield "seeds", Ask([prompt(90 + i, 6 + i) for i in range(8)], seeded, text_is_plain=False)
    yield "one", Ask([prompt(120, 9)], [greedy(256)])
    yield "batch", Ask([prompt(130 + i, 9) for i in range(8)], [greedy(256)] * 8)


def environment(name: str, on_gpu: bool, cache: Path) -> dict[str, str]:
    """What the process of a case needs beside the environment of this one."""
    case = CASES[name]
    found = model_cases.environment("sglang", case.started, on_gpu) | {"EAGLE_CACHE_DIR": str(cache)}
    if case.plugin and not on_gpu:
        found |= ({"EAGLE_OVERLAP": "1"} if case.overlap else {}) | ({"EAGLE_GRAPHS": "emulate"} if case.graphs else {})
    return found


def flags(name: str, models: Path, on_gpu: bool) -> dict[str, Any]:
    """The engine's arguments."""
    case = CASES[name]
    found = sglang_arguments(case.started, models / "target", models / "head", on_gpu)
    found |= {"context_length": 1024, "max_total_tokens": 16384, "max_running_requests": 12, "sleep_on_idle": False}
    found["mem_fraction_static"] = 0.5 if on_gpu else 0.3
    if not case.overlap:
        found["disable_overlap_schedule"] = True
    if on_gpu:
        found |= {"cuda_graph_backend_prefill": "disabled", "cuda_graph_bs_decode": [1, 2, 4, LARGEST_GRAPH]}
        if not case.graphs:
            found["cuda_graph_backend_decode"] = "disabled"
    return found
