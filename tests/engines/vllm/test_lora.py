"""Requests with a LoRA adapter: the text of plain decoding with the same adapter.

vLLM's CPU kernels give the adapter of a batch to its requests without one too, so they are not mixed here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import read_config
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm_engines import accept_length, engine
from vllm_greedy import make_prompts, write_heads, write_target

PROMPTS = make_prompts(12)
RANK = 4


def write_adapter(folder: Path, target: Path) -> Path:
    """An adapter of every layer's query and value projections, strong enough to change the text."""
    folder.mkdir()
    config = read_config(target)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    sizes = {"q_proj": heads * dim, "v_proj": config["num_key_value_heads"] * dim}
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(size, RANK, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": sorted(sizes)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


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
def test_text_of_adapters_equals_plain_decoding(tmp_path: Path, plugin: dict[str, bool]) -> None:
    target = write_target(tmp_path)
    heads = write_heads(tmp_path, target)
    adapter = LoRARequest("twist", 1, str(write_adapter(tmp_path / "adapter", target)))
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    with engine(target, **options) as llm:
        plain, without = answers(llm, adapter), answers(llm, None)
    assert sum(a != b for a, b in zip(plain, without, strict=True)) > len(PROMPTS) // 2
    with engine(target, next(iter(heads.values())), plugin=plugin, **options) as llm:
        assert answers(llm, adapter) == plain
        assert answers(llm, None) == without
        assert accept_length(llm) > 1.2
