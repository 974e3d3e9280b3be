"""LoRA as on a GPU: vLLM's metadata of a step, and forwards of the target that were captured with adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from interpreted_triton import ROOT, run_tests
from tiny_adapters import write_adapter
from vllm import LLM, SamplingParams
from vllm.config import LoRAConfig
from vllm.inputs import TokensPrompt
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper import punica_gpu
from vllm.lora.request import LoRARequest
from vllm_engines import engine, rounds, runner
from vllm_gpu_adapters import adapters_of_gpus
from vllm_greedy import make_prompts, write_heads, write_target
from vllm_host_waits import Guard

from eagle_plugin.runtime.captured_rounds import FunctionKey
from eagle_plugin.runtime.graph_emulator import recording_launches
from eagle_plugin.vllm.graph_test import GraphTest
from eagle_plugin.vllm.head_exchange import exchange_head
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


@contextmanager
def captured(models: Models, **options: Any) -> Iterator[tuple[LLM, list[FunctionKey]]]:
    """An engine whose target is captured, and the keys of what its steps run."""
    trees = {"depth": 3, "topk": 4, "nodes": 16, "plugin": {"async_scheduling": True}}
    with pytest.MonkeyPatch.context() as patch, adapters_of_gpus(), recording_launches():
        patch.setenv("EAGLE_GRAPHS", "emulate")
        with engine(models.target, models.head, **trees | OPTIONS | options) as llm:
            functions, keys = runner(llm)._step.functions, list[FunctionKey]()
            run = functions.run
            patch.setattr(functions, "run", lambda key, function: (keys.append(key), run(key, function))[1])
            yield llm, keys


def test_replays_with_adapters(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with several adapters, and without one, in batches whose target is replayed; no step waits for them."""
    with captured(models) as (llm, keys):
        guard = Guard(runner(llm), monkeypatch)
        assert answers(llm, models.mixed) == models.expected
        assert answers(llm, [None] * len(PROMPTS)) == models.without
        assert guard.steps > 20 and guard.findings == {}
        verified = [key for key in keys if key[0] == "verify"]
        assert all(key in runner(llm)._step.functions for key in verified)
        assert {key[3] for key in verified[:10]} == {True} and {key[3] for key in verified[-10:]} == {False}
        count, tokens = rounds(llm)
        assert tokens > 1.2 * count
        monkeypatch.setattr(TargetAdapters, "case", lambda self: False)
        assert answers(llm, models.mixed) != models.expected  # the control: what was captured without adapters


def check_graphs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test of both forwards, and of one whose replay leaves something else."""
    test = partial(GraphTest, runner(llm), RoundTest(runner(llm))._blocks_for)
    functions = runner(llm)._step.functions
    run = functions.run

    def wrong(key: FunctionKey, function: Any) -> Any:
        result = run(key, function)
        if key[0] == "verify" and key[3]:
            result[0][0] += 3
        return result

    with torch.inference_mode():
        assert test(torch.Generator().manual_seed(1)).run() == []
        monkeypatch.setattr(functions, "run", wrong)
        found = test(torch.Generator().manual_seed(1)).run()
    assert found and all(": verify: states of the target" in reason for reason in found)
    monkeypatch.undo()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"policy": "random"}, id="shapes"),
        pytest.param({"plugin": {}}, id="sync"),
        pytest.param({"compilation_config": {"cudagraph_specialize_lora": False}}, id="one forward"),
        pytest.param({"specialize_active_lora": True, "max_loras": 3}, id="specialised"),
        pytest.param({"max_num_batched_tokens": 136, "num_gpu_blocks_override": 20}, id="chunks"),
    ],
)
def test_replays_under_other_flags(options: dict[str, Any], models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    with captured(models, **options) as (llm, keys):
        for _ in range(2):
            assert answers(llm, models.mixed) == models.expected
            assert answers(llm, [None] * len(PROMPTS)) == models.without
        cases = {key[3] for key in keys if key[0] == "verify"}
        assert cases == ({True} if "compilation_config" in options else {True, False})
        if "specialize_active_lora" not in options:
            return
        check_graphs(llm, monkeypatch)
        # The control: a forward that was captured with rows of one kind reads no more than one.
        served = runner(llm)
        monkeypatch.setattr(served._step._forward.adapters, "_most", 0)
        monkeypatch.setattr(TargetAdapters, "selected", of_one_adapter)
        capture_anew(served)
        assert answers(llm, models.mixed) != models.expected
        monkeypatch.undo()
        capture_anew(served)
        assert answers(llm, models.mixed) == models.expected


@contextmanager
def of_one_adapter(adapters: TargetAdapters, rows: int, case: bool) -> Iterator[None]:
    kind = int(case)
    chosen = {LoRARequest("adapter 1", 1, "of no file")} if case else set()
    adapters._runner._set_active_loras((kind,) * rows, (kind,) * rows, chosen)
    yield


def capture_anew(served: Any) -> None:
    """As after an exchange of the head, between steps of a server."""
    with torch.inference_mode():
        exchange_head(served, Path(served.speculative_config.draft_model_config.model))


@pytest.mark.parametrize("rows", [2, 3, 8, 33])
def test_what_is_captured_serves_all_adapters(rows: int) -> None:
    """vLLM's kernels run over as many kinds of rows, at a replay, as there were at the capture."""
    config = LoRAConfig(max_lora_rank=8, max_loras=3, max_cpu_loras=3, specialize_active_lora=True)
    with adapters_of_gpus():
        wrapper = punica_gpu.PunicaWrapperGPU(64, 8, "cpu", lora_config=config)

    def select(of_logits: tuple[int, ...], of_rows: tuple[int, ...], adapters: set[LoRARequest]) -> None:
        assert {adapter.lora_int_id for adapter in adapters} == {*of_rows} - {0}
        wrapper.update_metadata(LoRAMapping(of_rows, of_logits, is_prefill=True), [1, 2, 3], 4, 100)

    served = SimpleNamespace(
        lora_config=config,
        compilation_config=SimpleNamespace(cudagraph_specialize_lora=True),
        has_adapters=lambda: False,
        _set_active_loras=select,
    )
    adapters, meta = TargetAdapters(served), wrapper.token_mapping_meta
    assert adapters.cases == (True, False) and adapters.case() is False
    with adapters.selected(rows, True):
        assert adapters.case() and not meta.no_lora_flag_cpu
        assert int(meta.meta_args(rows, True)[-1]) == {2: 2, 3: 4}.get(rows, 4)  # 1, 2 and 4 can be captured
    with adapters.selected(rows, False):
        assert not adapters.case() and meta.no_lora_flag_cpu
    served.has_adapters = lambda: True
    assert adapters.case()


@pytest.mark.matrix
@pytest.mark.slow
def test_products_are_those_of_vllms_kernels(tmp_path: Path) -> None:
    run_tests([ROOT / "tests/support/interpreted_lora.py"], tmp_path, 600)
