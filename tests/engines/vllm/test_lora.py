"""Requests with a LoRA adapter: the text of plain decoding with the same adapter.

vLLM's CPU kernels give the adapter of a batch to its requests without one too, so they are not mixed here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_adapters import write_adapter
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm_engines import engine, fixed_shapes, rounds
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
