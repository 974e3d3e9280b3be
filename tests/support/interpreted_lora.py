"""Engines with LoRA adapters whose kernels are those of GPUs, in Triton's interpreter: mixed requests, with trees.

test_lora.py runs this in a process that has Triton and its interpreter. The interpreter takes seconds for a step, so
that prompts and answers are short. vLLM's kernels of GPUs want the inputs of adapters in 16 bits: they get them
rounded, in plain decoding too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_adapters import write_adapter
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.punica_wrapper import punica_gpu
from vllm.lora.request import LoRARequest
from vllm.platforms.cpu import CpuPlatform
from vllm_engines import engine, rounds
from vllm_greedy import make_prompts, write_heads, write_target

PROMPTS = [prompt[:6] for prompt in make_prompts(12) if len(prompt) > 6][:3]
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "lora_dtype": "float16"}
OPTIONS |= {"max_num_seqs": 3, "max_model_len": 32, "max_num_batched_tokens": 32}  # at the start so many rows run


@pytest.fixture(autouse=True)
def kernels_of_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """vLLM's kernels of GPUs for adapters; yields the rows of each call."""
    calls: list[int] = []
    shrink = punica_gpu.lora_shrink

    def in_halves(rows: Tensor, *arguments: object) -> None:
        calls.append(len(rows))
        shrink(rows.half(), *arguments)

    name = f"{punica_gpu.__name__}.{punica_gpu.PunicaWrapperGPU.__name__}"
    monkeypatch.setattr(punica_gpu, "lora_shrink", in_halves)
    monkeypatch.setattr(CpuPlatform, "get_punica_wrapper", classmethod(lambda cls: name))
    yield calls


def answers(llm: LLM, adapters: list[LoRARequest | None], tokens: int) -> list[list[int]]:
    """The answers to PROMPTS in one batch, each with its adapter."""
    settings = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
    found = llm.generate(prompts, settings, lora_request=adapters, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in found]


@pytest.mark.timeout(1700)
def test_requests_with_and_without_adapters_in_one_batch(tmp_path: Path, kernels_of_gpus: list[int]) -> None:
    target = write_target(tmp_path)
    head = write_heads(tmp_path, target)["reduced"]
    mixed: list[LoRARequest | None] = [None] + [
        LoRARequest(str(seed), seed, str(write_adapter(tmp_path / str(seed), target, seed=seed))) for seed in (1, 2)
    ]
    with engine(target, **OPTIONS) as llm:
        plain = answers(llm, mixed, 8)
        without = answers(llm, [None] * 3, 8)
    assert plain[0] == without[0] and all(a != b for a, b in zip(plain[1:], without[1:], strict=True))
    kernels_of_gpus.clear()
    with engine(target, head, depth=2, topk=2, nodes=4, **OPTIONS) as llm:
        assert answers(llm, mixed, 8) == plain
        count, tokens = rounds(llm)
        assert tokens / count > 1.1
    assert max(kernels_of_gpus) >= 3 * 4  # the trees of all requests in one forward
