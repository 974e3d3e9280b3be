"""Requests with a LoRA adapter: the text of plain decoding with the same adapter.

vLLM's CPU kernels give the adapter of a batch to its requests without one too, so they are not mixed here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import family_head
from multimodal_models import multimodal_target
from tiny_adapters import merge_adapter, write_adapter
from transformers import AutoModelForImageTextToText
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm_engines import engine, fixed_shapes, random_shapes, rounds
from vllm_greedy import make_prompts, write_heads, write_target

from eagle_plugin.runtime import cost_files

PROMPTS = make_prompts(12)


def answers(llm: LLM, adapter: LoRARequest | None) -> list[list[int]]:
    """24 greedy tokens to each of PROMPTS."""
    settings = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
    found = llm.generate(prompts, settings, lora_request=adapter, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in found]


@pytest.mark.parametrize(
    "plugin",
    [pytest.param({}, id="sync"), pytest.param({"async_scheduling": True}, id="async", marks=pytest.mark.matrix)],
)
def test_text_of_adapters_equals_plain_decoding(
    tmp_path: Path, plugin: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine with trees measures its costs at the start, without an adapter, and changes the shapes later."""
    monkeypatch.setattr(cost_files, "folder", lambda: tmp_path / "costs")
    target = write_target(tmp_path)
    heads = write_heads(tmp_path, target)
    adapter = LoRARequest("twist", 1, str(write_adapter(tmp_path / "adapter", target)))
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    with engine(target, **options) as llm:
        plain, without = answers(llm, adapter), answers(llm, None)
    assert sum(a != b for a, b in zip(plain, without, strict=True)) > len(PROMPTS) // 2
    with engine(target, next(iter(heads.values())), policy="auto", plugin=plugin, **options) as llm:
        assert plugin or len(list((tmp_path / "costs").iterdir())) == 1
        assert answers(llm, adapter) == plain
        assert answers(llm, None) == without
        before = rounds(llm)
        with fixed_shapes(llm):
            assert answers(llm, adapter) == plain
            assert answers(llm, None) == without
        count, tokens = rounds(llm, before)
        assert tokens / count > 1.2


@torch.inference_mode()
def greedy(model: Any) -> list[list[int]]:
    """24 greedy tokens to each of PROMPTS by transformers."""
    length = {"max_new_tokens": 24, "min_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None}
    prompts = [torch.tensor([prompt]) for prompt in PROMPTS]
    found = [
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, **length) for ids in prompts
    ]
    return [text[0, ids.shape[1] :].tolist() for text, ids in zip(found, prompts, strict=True)]


@pytest.mark.matrix
def test_adapters_of_gated_delta_nets(tmp_path: Path) -> None:
    """Qwen3.5, with adapters on its layers of both kinds; vLLM has no plain decoding of it in float32 on CPUs."""
    target = multimodal_target(tmp_path / "target", "qwen3_5")
    head = family_head(tmp_path / "head", target)
    model = AutoModelForImageTextToText.from_pretrained(target, dtype=torch.float32)
    without = greedy(model)
    layers = ["q_proj", "v_proj", "in_proj_qkv", "in_proj_z", "out_proj"]
    adapter = LoRARequest("twist", 1, str(merge_adapter(tmp_path / "adapter", model, layers)))
    expected = greedy(model)
    assert sum(a != b for a, b in zip(expected, without, strict=True)) > len(PROMPTS) // 2
    trees: dict[str, Any] = {"depth": 3, "topk": 4, "nodes": 16, "gpu_memory_utilization": 0.3}
    with engine(target, head, enable_lora=True, max_lora_rank=8, max_loras=1, **trees) as llm:
        assert answers(llm, adapter) == expected
        assert answers(llm, None) == without
        count, tokens = rounds(llm)
        assert tokens / count > 1.2
        with random_shapes(llm):
            assert answers(llm, adapter) == expected
