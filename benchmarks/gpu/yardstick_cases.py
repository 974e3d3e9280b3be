"""The engines of steps `yardstick` and `vllm-yardstick`, how each is started, and the rates of accepted drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu import model_cases
from benchmarks.gpu.model_cases import CHAIN, COMPILED, FIXED, TREE, V2, Case, sglang_arguments, vllm_arguments
from benchmarks.gpu.steps import Setting
from benchmarks.simulate_rounds import Requests
from benchmarks.simulate_traces import Outcomes, Trace
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.synthetic import Rates
from eagle_plugin.policy.shapes import captured_shapes, shape_for, shapes_within
from eagle_plugin.runtime.synthetic import VARIABLE, format_rates

TRACE = Path(__file__).resolve().parents[1] / "traces" / "smollm2-135m.npz"  # benchmarks/simulate_record.py
WALKS, ROUNDS = 256, 200  # of a recorded text, to count what rounds accept
BLOCK = model_cases.BLOCK
GIB = 1 << 30


class Size(NamedTuple):
    """How much is asked."""

    dtype: str
    requests: tuple[int, ...]  # at a time
    prompt: int  # tokens
    answer: int  # tokens
    repeats: int

    @property
    def context(self) -> int:
        """Tokens of a request, and what rounds write after it."""
        return -(-(self.prompt + self.answer + 128) // 128) * 128

    @property
    def cache(self) -> int:
        """Tokens of all requests."""
        return max(self.requests) * self.context


FULL = Size("bfloat16", (1, 8, 32, 64), 400, 256, 2)
SHORT = Size("bfloat16", (1, 8, 32), 400, 128, 2)
SMALLEST = Size("float32", (1, 4), 12, 96, 1)
LONG_CHAIN = Shape.chain(5)

CASES = {
    "sglang": {
        "plain": Case("plain decoding"),
        "engine-chain": Case("SGLang's own EAGLE-3, chains of 3", shape=CHAIN),
        "engine-tree": Case("SGLang's own EAGLE-3, trees 3/4/16", shape=TREE),
        "engine-chain-5": Case("SGLang's own EAGLE-3, chains of 5", shape=LONG_CHAIN),
        "plugin-same": Case("the plugin, the flags of SGLang's chains of 3", True, CHAIN),
        "plugin-tree": Case("the plugin, trees 3/4/16 in every round", True, TREE, environment=FIXED),
        "plugin-policy": Case("the plugin, shapes by the policy up to 3/4/16", True, TREE),
    },
    # vLLM has no trees of its own.
    "vllm": {
        "plain": Case("plain decoding"),
        "engine-chain": Case("vLLM's own EAGLE-3, chains of 3", shape=CHAIN),
        "engine-chain-5": Case("vLLM's own EAGLE-3, chains of 5", shape=LONG_CHAIN),
        "plugin-same": Case("the plugin, the flags of vLLM's chains of 3", True, CHAIN, own_flags=False),
        "plugin-tree": Case("the plugin, trees 3/4/16 in every round", True, TREE, environment=FIXED),
        "plugin-policy": Case("the plugin, shapes by the policy up to 3/4/16", True, TREE),
        "plugin-v2": Case("the plugin in the V2 model runner, up to 3/4/16", True, TREE, environment=V2),
    },
}
# As many as start together; the others are in the whole form alone.
SHORT_CASES = {
    "sglang": ("plain", "engine-chain", "engine-tree", "plugin-same", "plugin-policy"),
    "vllm": ("plain", "engine-chain", "plugin-same", "plugin-policy", "plugin-v2"),
}
NEEDED = ("plain", "plugin-same", "plugin-policy")  # without a row of each the step fails, after the others


def size_of(setting: Setting) -> Size:
    """How much a step asks in this setting."""
    return SMALLEST if setting.tiny else SHORT if setting.short else FULL


def cases_of(engine: str, setting: Setting) -> list[str]:
    """The names of the cases that are started. vLLM's V2 runner needs Triton, which a CPU seldom has."""
    if setting.short and not setting.tiny:
        return list(SHORT_CASES[engine])
    return [name for name in CASES[engine] if setting.on_gpu or name != "plugin-v2"]


def recorded_rates() -> dict[Shape, Rates]:
    """What rounds of each shape accept of a recorded text, the shapes of the policy among them.

    Each round begins where the last one of its shape ended; a tree has the rates that its own nodes earn.
    """
    # vLLM's flags say how many tokens are drafted, and the plugin chooses trees of so many.
    caps = (TREE, CHAIN, shape_for(CHAIN.width - 1), shape_for(CHAIN.width - 1, on_gpu=True))
    found = dict.fromkeys([LONG_CHAIN, *caps])
    for cap in caps:
        found |= dict.fromkeys([*shapes_within(cap), *captured_shapes(cap)])
    shapes = [shape for shape in found if shape != PLAIN]
    outcomes = Outcomes.of(Trace.load(TRACE), shapes)
    rates: dict[Shape, Rates] = {}
    for column, shape in enumerate(outcomes.shapes):
        gen = np.random.default_rng(0)
        requests, counts = Requests(outcomes, WALKS, gen), np.zeros(shape.max_accept_length - 1)
        for _ in range(ROUNDS):
            accepted = outcomes.accepted[requests.at, column]
            counts += [(accepted > depth).sum() for depth in range(len(counts))]
            requests.advance(accepted + 1)
        rates[shape] = tuple(float(count) / (WALKS * ROUNDS) for count in counts)
    return rates


def wanted_length(case: Case, rates: dict[Shape, Rates]) -> float | None:
    """The accept length that the rates give; None where the policy chooses the shapes."""
    if case.shape is None:
        return 1.0
    return None if case.plugin and FIXED[0] not in case.environment else 1 + sum(rates[case.shape])


def environment(engine: str, case: Case, on_gpu: bool, rates: dict[Shape, Rates]) -> dict[str, str]:
    """What the process of a case needs beside the environment of this one."""
    found = model_cases.environment(engine, case, on_gpu)
    if case.plugin:
        found[VARIABLE] = format_rates(rates)
        # On a CPU the same code: rounds that are captured and scheduled ahead, after a self-test.
        found |= {} if on_gpu else {"EAGLE_SELFTEST": "1", "EAGLE_GRAPHS": "emulate", "EAGLE_OVERLAP": "1"}
    elif case.shape is not None and engine == "sglang":
        found["SGLANG_SIMULATE_ACC_LEN"] = f"{1 + sum(rates[case.shape]):.4f}"
        found["SGLANG_SIMULATE_ACC_METHOD"] = "match-expected"
        if case.shape.topk == 1:  # else all tokens are one and the same
            found["SGLANG_SIMULATE_ACC_TOKEN_MODE"] = "real-draft-token"
    return found


class Start(NamedTuple):
    """What an engine is started with."""

    target: Path
    head: Path
    on_gpu: bool
    fraction: float  # of the GPU's memory that it may take
    size: Size
    rates: dict[Shape, Rates]


def arguments(engine: str, case: Case, start: Start, mode: str = COMPILED) -> dict[str, Any]:
    """Of `sglang.Engine` or `vllm.LLM`; mode: of `model_cases.modes_of`."""
    return _sglang(case, start) if engine == "sglang" else _vllm(case, start, mode)


def _sglang(case: Case, start: Start) -> dict[str, Any]:
    target, head, on_gpu, _, size, _ = start
    found = sglang_arguments(case, target, head, on_gpu)
    found |= {"dtype": size.dtype, "load_format": "dummy", "skip_tokenizer_init": True, "stream_interval": 1}
    found |= {"context_length": size.context, "max_total_tokens": size.cache}
    found["max_running_requests"] = max(size.requests)
    if case.shape is not None:
        found["speculative_draft_load_format"] = "safetensors"
    if on_gpu:
        found |= {"cuda_graph_bs_decode": list(size.requests), "mem_fraction_static": 0.93}
    return found


def _vllm(case: Case, start: Start, mode: str) -> dict[str, Any]:
    target, head, on_gpu, fraction, size, rates = start
    found = vllm_arguments(case, target, head, on_gpu, mode)
    found |= {"dtype": size.dtype, "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": size.context}
    found |= {"max_num_seqs": max(size.requests), "num_gpu_blocks_override": size.cache // BLOCK[on_gpu]}
    if on_gpu:
        rows = case.shape.width if case.shape is not None and not case.plugin else 1
        found["cudagraph_capture_sizes"] = sorted({*size.requests, *(n * rows for n in size.requests)})
        found |= {"kv_cache_memory_bytes": 8 * GIB, "gpu_memory_utilization": fraction}
    if case.shape is not None:
        found["speculative_config"] |= {"draft_load_config": {"load_format": "safetensors"}}
        if not case.plugin and on_gpu:  # vLLM has no synthetic acceptance on a CPU
            own = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(rates[case.shape])}
            found["speculative_config"] |= own
    if case.plugin and (case.own_flags or not on_gpu):  # on a CPU too
        options = found.get("additional_config", {}).get("eagle_plugin", {})
        found["additional_config"] = {"eagle_plugin": options | {"async_scheduling": True}}
    return found
