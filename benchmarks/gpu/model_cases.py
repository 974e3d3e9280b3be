"""The engines of steps `model` and `vllm-model`, and how each is started."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.steps import Setting
from eagle_plugin.core.shape import Shape

TREE, CHAIN = Shape(3, 4, 16), Shape.chain(3)
REQUESTS = 32  # at a time, and the largest captured batch
CONTEXT, TOKENS = 2048, 65536  # of a request, and of the KV cache
BLOCK = {True: 16, False: 128}  # vLLM's, on a GPU and on a CPU
# Of vLLM's caches, in place of a measurement of the GPU's memory, which counts what the other engines take meanwhile.
# TOKENS of SmolLM2-135M and its head in float32 take 3.1 GiB; vLLM allocates what TOKENS need.
CACHE_BYTES = 4 << 30
# Rows of a step of vLLM; up to REQUESTS x 16 nodes.
CAPTURED_ROWS = [1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512]


class Case(NamedTuple):
    """How an engine is started."""

    what: str
    plugin: bool = False
    shape: Shape | None = None  # None: plain decoding
    dtype: str = "bfloat16"
    environment: tuple[tuple[str, str], ...] = ()
    own_flags: bool = True  # of the plugin in vLLM: depth and topk beside vLLM's own flags


FIXED, V2 = (("EAGLE_POLICY", "fixed"),), (("EAGLE_VLLM_RUNNER", "v2"),)
# SGLang asks for the distribution sglang-kernel before it starts; a carried one may have the module alone.
ANY_KERNELS = {"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}
# How engines run, in every row: those of vLLM that do not start compiled start again with graphs alone.
COMPILED, GRAPHS, EAGER = "compiled", "graphs without compilation", "eager"
FLOATS = {
    "plain-float32": Case("plain decoding in float32", dtype="float32"),
    "plugin-float32": Case("the plugin in float32", True, TREE, "float32", FIXED),
}
CASES = {
    "sglang": {
        "plain": Case("plain decoding"),
        "engine-tree": Case("SGLang's own EAGLE-3, trees 3/4/16", shape=TREE),
        "engine-chain": Case("SGLang's own EAGLE-3, chains of 3", shape=CHAIN),
        "plugin": Case("the plugin, trees up to 3/4/16", True, TREE),
        "plugin-tree": Case("the plugin, trees 3/4/16 in every round", True, TREE, environment=FIXED),
        "plugin-chain": Case("the plugin, chains of 3 in every round", True, CHAIN, environment=FIXED),
        **FLOATS,
    },
    "vllm": {
        "plain": Case("plain decoding"),
        "engine-chain": Case("vLLM's own EAGLE-3, chains of 3", shape=CHAIN),
        "plugin": Case("the plugin in the V1 model runner, trees up to 3/4/16", True, TREE),
        "plugin-v2": Case(
            "the plugin in the V2 model runner, trees up to 3/4/16",
            True,
            TREE,
            environment=V2,
        ),
        "plugin-tree": Case("the plugin, trees 3/4/16 in every round", True, TREE, environment=FIXED),
        "plugin-chain": Case("the plugin, chains of 3 in every round", True, CHAIN, environment=FIXED),
        **FLOATS,
    },
}
# The cases that are asked at temperature 1, too.
SAMPLED_CASES = {
    "sglang": ("plain", "engine-tree", "engine-chain", "plugin"),
    "vllm": ("plain", "engine-chain", "plugin"),
}
NEED_FLASHINFER = {"sglang": ("engine-tree", "engine-chain"), "vllm": ()}  # at temperature 1
SHORT_CASES = {
    "sglang": ("plain", "engine-tree", "engine-chain", "plugin", "plugin-tree", *FLOATS),
    "vllm": ("plain", "engine-chain", "plugin", "plugin-v2", *FLOATS),
}


class Amount(NamedTuple):
    """How much is asked of each engine."""

    questions: int | None  # None: all
    repeats: int
    concurrency: tuple[int, ...]  # requests at a time, greedy
    sampled: tuple[int, ...]  # requests at a time at temperature 1
    tokens: int  # of an answer
    equal_tokens: int  # of an answer in float32
    warm_up: tuple[int, ...]  # requests at a time: compilers, and the policy's first measurements


FULL = Amount(None, 3, (1, 8, 32), (1, 8), 128, 64, (1, 8, 8, 32))
SHORT = Amount(12, 2, (1, 8, 32), (1,), 128, 64, (1, 8, 8, 32))
SMALLEST = Amount(4, 1, (1, 8), (1,), 16, 16, (1, 8))


def amount_of(setting: Setting) -> Amount:
    """What a step asks in this setting."""
    return SMALLEST if setting.tiny else SHORT if setting.short else FULL


def cases_of(engine: str, setting: Setting) -> tuple[str, ...]:
    """The names of the cases that are started."""
    if setting.tiny:
        return ("plain", "plugin", *FLOATS)
    return SHORT_CASES[engine] if setting.short else tuple(CASES[engine])


def environment(engine: str, case: Case, on_gpu: bool) -> dict[str, str]:
    """What the process of a case needs beside the environment of this one."""
    served = "force" if engine == "vllm" and on_gpu else "1"
    found = {"EAGLE_PLUGIN": served if case.plugin else "0", "HF_HUB_OFFLINE": "1"} | dict(case.environment)
    # The engines' attention in Triton multiplies float32 in TF32 unless Triton is told not to.
    found |= {"TRITON_F32_DEFAULT": "tf32x3", "NVIDIA_TF32_OVERRIDE": "0"} if case.dtype == "float32" else {}
    if engine == "vllm":
        # The log says who serves.
        found |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        return found | ({} if on_gpu else {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"})
    return found | (ANY_KERNELS if on_gpu else {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"})


def engine_facts(engine: str, on_gpu: bool) -> dict[str, str]:
    """What SGLang's rows depend on beside its version."""
    if engine != "sglang":
        return {}
    given = sglang_arguments(CASES[engine]["plain"], Path(), Path(), on_gpu)
    try:
        kernels = importlib.metadata.version("sglang-kernel")
    except importlib.metadata.PackageNotFoundError:
        kernels = "none" if importlib.util.find_spec("sgl_kernel") is None else "a stand-in"
    return {"sgl_kernel": kernels, "attention_backend": given.get("attention_backend", "SGLang's choice")}


def sglang_arguments(case: Case, target: Path, head: Path, on_gpu: bool) -> dict[str, Any]:
    """Of `sglang.Engine`. Several engines share the GPU, so the caches are limited by their tokens."""
    found: dict[str, Any] = {"model_path": str(target), "device": "cuda" if on_gpu else "cpu", "dtype": case.dtype}
    found |= {"context_length": CONTEXT, "max_total_tokens": TOKENS, "max_running_requests": REQUESTS}
    found |= {"random_seed": 1, "skip_server_warmup": True, "log_level": "info", "sleep_on_idle": True}
    found["mem_fraction_static"] = 0.85 if on_gpu else 0.6  # each counts what the others take meanwhile
    if on_gpu:
        # The attention of all cases, plain decoding too, is then in Triton; FlashInfer and FlashAttention 3, SGLang's
        # defaults, need packages that this step does without.
        found |= {"attention_backend": "triton", "sampling_backend": "pytorch"}
        found["cuda_graph_bs_decode"] = [1, 2, 4, 8, 16, 24, REQUESTS]
    if case.shape is not None:
        found |= {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head)}
        found |= {"speculative_num_steps": case.shape.steps, "speculative_eagle_topk": case.shape.topk}
        found["speculative_num_draft_tokens"] = case.shape.width
    return found


def modes_of(engine: str, on_gpu: bool) -> tuple[str, ...]:
    """How an engine is started: in the first of these in which it starts. On a CPU compilation takes minutes."""
    if not on_gpu:
        return (EAGER,)
    return (COMPILED, GRAPHS) if engine == "vllm" else (GRAPHS,)


def vllm_arguments(case: Case, target: Path, head: Path, on_gpu: bool, mode: str = COMPILED) -> dict[str, Any]:
    """Of `vllm.LLM`. Several engines share the GPU: each takes a small part of it.

    mode: on a GPU, `COMPILED` or `GRAPHS`: then vLLM captures whole decode steps, and the plugin what it always does.
    """
    found: dict[str, Any] = {"model": str(target), "dtype": case.dtype, "max_model_len": CONTEXT, "seed": 1}
    found |= {"max_num_seqs": REQUESTS, "gpu_memory_utilization": 0.12, "disable_log_stats": False}
    found |= {"block_size": BLOCK[on_gpu], "num_gpu_blocks_override": TOKENS // BLOCK[on_gpu]}
    found["enforce_eager"] = not on_gpu
    if on_gpu:
        found["kv_cache_memory_bytes"] = CACHE_BYTES
        found["cudagraph_capture_sizes"] = CAPTURED_ROWS
        if mode == GRAPHS:
            found["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if case.shape is not None:
        drafts = case.shape.width - 1
        found["speculative_config"] = {"method": "eagle3", "model": str(head), "num_speculative_tokens": drafts}
    if case.plugin and case.own_flags and case.shape is not None:
        options = {"depth": case.shape.steps, "topk": case.shape.topk}
        found["additional_config"] = {"eagle_plugin": options}
    return found
