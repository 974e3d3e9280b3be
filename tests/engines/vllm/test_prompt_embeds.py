"""Prompts that are given as embeddings: the target continues them as it does their tokens, which nobody knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from vllm import SamplingParams
from vllm.inputs import EmbedsPrompt, TokensPrompt
from vllm_engines import accept_length, engine, generate
from vllm_greedy import make_prompts, write_heads, write_target

TREES: dict[str, Any] = {"depth": 3, "topk": 4, "nodes": 16}
PROMPTS = make_prompts(12)


@pytest.mark.parametrize("is_ahead", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_text_of_plain_decoding(is_ahead: bool, tmp_path: Path) -> None:
    """In a batch with prompts of tokens; they are read in parts, beside trees.

    A step ahead, the engine takes tokens for embeddings where drafts were rejected.
    """
    target, head = write_target(tmp_path), tmp_path / "reduced"
    write_heads(tmp_path, target)
    with engine(target) as plain:
        wanted = generate(plain, PROMPTS)
    embed = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    given = [
        EmbedsPrompt(prompt_embeds=embed[prompt]) if i % 2 else TokensPrompt(prompt_token_ids=prompt)
        for i, prompt in enumerate(PROMPTS)
    ]
    options = {"max_num_batched_tokens": 96, "enable_prompt_embeds": True, "plugin": {"async_scheduling": is_ahead}}
    with engine(target, head, policy="random", **TREES, **options) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False)
        found = [list(one.outputs[0].token_ids) for one in llm.generate(given, sampling, use_tqdm=False)]
        assert found == wanted and accept_length(llm) > 1.2
