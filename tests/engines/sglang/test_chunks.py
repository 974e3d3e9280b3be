"""Plain decoding of Llama 4 in SGLang over several attention chunks: the texts of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from family_models import CHUNK, VOCAB, sglang_target
from serving import serving, tiny_spec

pytest.importorskip("sglang")
pytestmark = [pytest.mark.server, pytest.mark.matrix]


def test_attention_chunks_are_those_of_transformers(tmp_path: Path) -> None:
    """Prompts of more than three chunks, whose answers go on over further ones."""
    from transformers import AutoModelForCausalLM

    target, length = sglang_target(tmp_path / "target", "llama4_text"), 3 * CHUNK
    dice = random.Random(5)
    prompts = [dice.choices(range(3, VOCAB), k=length + extra) for extra in (1, 20, CHUNK)]
    with serving([tiny_spec(target, extra_flags=("--skip-server-warmup",))], tmp_path / "logs") as (server,):
        found = []
        for prompt in prompts:
            sampling = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": sampling}
            answer = httpx.post(f"{server.url}/generate", json=body, timeout=600, trust_env=False)
            found.append(answer.raise_for_status().json()["output_ids"])
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    def answers(chunk: int) -> list[list[int]]:
        model.config.attention_chunk_size = chunk
        return [greedy(model, prompt, length) for prompt in prompts]

    assert found == answers(CHUNK)
    assert found != answers(1024)  # the chunks count


@torch.no_grad()
def greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """Without a cache of keys: every token from the whole text."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]
