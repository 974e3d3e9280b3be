"""One engine of steps `model` and `vllm-model`:

    python -m benchmarks.gpu.model_engine sglang CASE --target DIR --head DIR

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
from typing import Any, Protocol

from benchmarks.gpu.model_cases import CASES, Case, sglang_arguments, vllm_arguments


class Served(Protocol):
    """An engine in this process or its children."""

    def forget(self) -> None:
        """Empty the prefix cache."""

    def answer(self, prompts: list[list[int]], temperature: float, tokens: int) -> dict[str, Any]:
        """text: the token ids of the answers to prompts that are sent at the same time; rounds: with speculation."""


class SGLang:
    """SGLang's engine."""

    def __init__(self, case: Case, target: Path, head: Path, on_gpu: bool, eager: bool) -> None:
        import sglang

        self._engine = sglang.Engine(**sglang_arguments(case, target, head, on_gpu))

    def forget(self) -> None:
        self._engine.flush_cache()

    def answer(self, prompts: list[list[int]], temperature: float, tokens: int) -> dict[str, Any]:
        parameters = [{"temperature": temperature, "max_new_tokens": tokens}] * len(prompts)
        answers = self._engine.generate(input_ids=prompts, sampling_params=parameters)
        rounds = sum(one["meta_info"].get("spec_verify_ct") or 0 for one in answers)
        return {"text": [one["output_ids"] for one in answers], "rounds": rounds}


class VLLM:
    """vLLM's engine."""

    def __init__(self, case: Case, target: Path, head: Path, on_gpu: bool, eager: bool) -> None:
        import vllm

        self._new_parameters, self._speculates = vllm.SamplingParams, case.shape is not None
        self._engine = vllm.LLM(**vllm_arguments(case, target, head, on_gpu, eager))

    def forget(self) -> None:
        self._engine.reset_prefix_cache()

    def answer(self, prompts: list[list[int]], temperature: float, tokens: int) -> dict[str, Any]:
        before = self._counts()
        parameters = self._new_parameters(temperature=temperature, max_tokens=tokens)
        requests: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self._engine.generate(requests, parameters, use_tqdm=False)
        drafts, accepted = (after - first for after, first in zip(self._counts(), before, strict=True))
        text = [list(one.outputs[0].token_ids) for one in answers]
        # vLLM counts the steps that verified drafts; as in eagle_plugin/bench/vllm_server.py.
        own = sum(map(len, text)) - len(text) - accepted
        return {"text": text, "rounds": max(drafts, own) if self._speculates else 0}

    def _counts(self) -> tuple[int, int]:
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        found = {metric.name: getattr(metric, "value", 0) for metric in self._engine.get_metrics()}
        return int(found.get(names[0], 0)), int(found.get(names[1], 0))


ENGINES = {"sglang": SGLang, "vllm": VLLM}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("case")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation and graphs")
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    began = time.perf_counter()
    case, on_gpu = CASES[options.engine][options.case], options.device.startswith("cuda")
    engine: Served = ENGINES[options.engine](case, options.target, options.head, on_gpu, options.eager)
    print(json.dumps({"start_seconds": time.perf_counter() - began}), file=replies, flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        if batch["forget"]:
            engine.forget()
        began = time.perf_counter()
        found = engine.answer(batch["prompts"], batch["temperature"], batch["tokens"])
        found |= {"seconds": time.perf_counter() - began, "tokens": sum(map(len, found["text"]))}
        print(json.dumps(found), file=replies, flush=True)
    os._exit(0)  # the parent ends the processes of the engine, which is quicker than a shutdown


if __name__ == "__main__":
    main()
