"""LoRA as on a GPU: vLLM's metadata of a step, and forwards of the target that were captured with adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny_adapters import write_adapter
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm_engines import engine, rounds, runner
from vllm_gpu_adapters import adapters_of_gpus
from vllm_greedy import make_prompts, write_heads, write_target

from eagle_plugin.runtime.graph_emulator import recording_launches
from eagle_plugin.vllm.graph_test import GraphTest
from eagle_plugin.vllm.round_test import RoundTest
from eagle_plugin.vllm.target_adapters import TargetAdapters

PROMPTS = make_prompts(12)
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
Adapters = list[LoRARequest | None]


class Models(NamedTuple):
    target: Path
    head: Path
    mixed: Adapters  # of PROMPTS; three adapters, of which a batch has at most two
    expected: list[list[int]]
    without: list[list[int]]


def answers(llm: LLM, adapters: Adapters) -> list[list[int]]:
    """24 greedy tokens to each of PROMPTS, up to 8 in a batch."""
    settings = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
    found = llm.generate(prompts, settings, lora_request=adapters, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in found]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder = tmp_path_factory.mktemp("adapters")
    target = write_target(folder)
    three = [
        LoRARequest(str(seed), seed, str(write_adapter(folder / str(seed), target, seed=seed))) for seed in (1, 2, 3)
    ]
    mixed: Adapters = [[None, *three][i % 4] for i in range(len(PROMPTS))]
    with adapters_of_gpus(), engine(target, **OPTIONS) as llm:
        expected, without = answers(llm, mixed), answers(llm, [None] * len(PROMPTS))
    changed = [a != b for a, b in zip(expected, without, strict=True)]
    assert not any(changed[::4]) and sum(changed) > len(PROMPTS) // 2
    yield Models(target, write_heads(folder, target)["reduced"], mixed, expected, without)


def test_replays_with_adapters(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with several adapters, and without one, in batches whose target is replayed."""
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    plugin = {"async_scheduling": True}
    with (
        adapters_of_gpus(),
        recording_launches(),
        engine(models.target, models.head, depth=3, topk=4, nodes=16, plugin=plugin, **OPTIONS) as llm,
    ):
        step = runner(llm)._step
        replayed = list[Any]()
        run = step.functions.run
        monkeypatch.setattr(step.functions, "run", lambda key, f: (replayed.append(key), run(key, f))[1])
        assert answers(llm, models.mixed) == models.expected
        assert answers(llm, [None] * len(PROMPTS)) == models.without
        cases = [key[3] for key in replayed if key[0] == "verify"]
        assert cases.count(True) > 10 and cases.count(False) > 10
        assert all(key in step.functions for key in replayed if key[0] == "verify")
        count, tokens = rounds(llm)
        assert tokens > 1.2 * count
        with monkeypatch.context() as patch:  # the control: what was captured without adapters
            patch.setattr(TargetAdapters, "case", lambda self: False)
            assert answers(llm, models.mixed) != models.expected
