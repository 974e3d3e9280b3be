"""One engine of step `model`: python -m benchmarks.gpu.model_engine CASE --target DIR --head DIR.

It reads one JSON line per batch of requests from standard input, sends them at the same time, and writes one JSON line
with the answers to standard output; everything else that is printed goes to standard error. It ends with its input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
LARGEST_GRAPH = 32


class Case(NamedTuple):
    """How an engine is started."""

    what: str
    plugin: bool
    speculation: dict[str, Any]  # empty: plain decoding
    dtype: str = "bfloat16"
    policy: str = "auto"  # EAGLE_POLICY


CASES = {
    "plain": Case("plain decoding", False, {}),
    "engine-tree": Case("SGLang's own EAGLE-3, trees 3/4/16", False, TREE),
    "engine-chain": Case("SGLang's own EAGLE-3, chains of 3", False, CHAIN),
    "plugin": Case("the plugin, trees up to 3/4/16", True, TREE),
    "plugin-tree": Case("the plugin, trees 3/4/16 in every round", True, TREE, policy="fixed"),
    "plugin-chain": Case("the plugin, chains of 3 in every round", True, CHAIN, policy="fixed"),
    "plain-float32": Case("plain decoding in float32", False, {}, dtype="float32"),
    "plugin-float32": Case("the plugin in float32", True, TREE, dtype="float32", policy="fixed"),
}


def environment(case: Case, on_gpu: bool) -> dict[str, str]:
    """What the process of a case needs beside the environment of this one."""
    found = {"EAGLE_PLUGIN": "1" if case.plugin else "0", "EAGLE_POLICY": case.policy, "HF_HUB_OFFLINE": "1"}
    # SGLang's kernels for prompts multiply float32 in TF32 unless Triton is told not to.
    found |= {"TRITON_F32_DEFAULT": "tf32x3", "NVIDIA_TF32_OVERRIDE": "0"} if case.dtype == "float32" else {}
    return found | ({} if on_gpu else {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"})


def flags(case: Case, target: Path, head: Path, on_gpu: bool) -> dict[str, Any]:
    """The engine's arguments. Several engines share the GPU, so the caches are limited by their tokens."""
    found: dict[str, Any] = {"model_path": str(target), "device": "cuda" if on_gpu else "cpu", "dtype": case.dtype}
    found |= {"context_length": 2048, "max_total_tokens": 65536, "max_running_requests": LARGEST_GRAPH}
    found |= {"random_seed": 1, "skip_server_warmup": True, "log_level": "info", "sleep_on_idle": True}
    found["mem_fraction_static"] = 0.85 if on_gpu else 0.3
    if on_gpu:
        # The attention of all cases, plain decoding too, is then in Triton; FlashInfer and FlashAttention 3, SGLang's
        # defaults, need packages that this step does without.
        found |= {"attention_backend": "triton", "sampling_backend": "pytorch"}
        found["cuda_graph_bs_decode"] = [1, 2, 4, 8, 16, 24, LARGEST_GRAPH]
    if case.speculation:
        found |= {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head)} | case.speculation
    return found


def answer(engine: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """What the engine says to requests that are sent at the same time, and how long all of them take."""
    if batch.get("flush"):
        engine.flush_cache()
    began = time.perf_counter()
    answers = engine.generate(input_ids=batch["prompts"], sampling_params=batch["parameters"])
    seconds = time.perf_counter() - began
    about = [one["meta_info"] for one in answers]
    found = {"text": [one["output_ids"] for one in answers], "seconds": seconds}
    found["tokens"] = sum(one["completion_tokens"] for one in about)
    return found | {"rounds": sum(one.get("spec_verify_ct") or 0 for one in about)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import sglang

    began = time.perf_counter()
    case = CASES[options.case]
    engine = sglang.Engine(**flags(case, options.target, options.head, options.device.startswith("cuda")))
    print(json.dumps({"start_seconds": time.perf_counter() - began}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=answers, flush=True)
    os._exit(0)  # the parent ends the processes of the engine, which is quicker than a shutdown


if __name__ == "__main__":
    main()
