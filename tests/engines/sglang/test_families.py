"""Targets of other families than Llama in SGLang: the text of plain decoding, from trees that are accepted."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from family_models import CHANGES, CHUNK, VOCAB, family_head, family_target
from serving import OVERLAP, accept_length, generate, generate_all, responses, serving, tiny_spec
from tiny_checkpoints import read_config
from word_prompts import make_prompts

from eagle_plugin.bench.servers import Server

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

SHAPE = (3, 8, 32)
TOKENS = 96  # five windows
SWA = ("gemma4_text", "gpt_oss", "llama4_text")  # whose local layers have a KV pool of their own
ALWAYS = ("gpt_oss",)
# The class that SGLang serves a family's texts by, where it is not the text model's own: of Llama 4's it loads neither
# the experts nor the rotated dimensions in the order that it computes with (docs/upstream.md).
SERVED_AS = {"llama4_text": "Llama4ForConditionalGeneration"}


def served_target(folder: Path, family: str) -> Path:
    target = family_target(folder, family)
    if family in SERVED_AS:
        config = read_config(target) | {"architectures": [SERVED_AS[family]]}
        (target / "config.json").write_text(json.dumps(config))
    return target


def pair(folder: Path, family: str, kind: str, *, flags: tuple[str, ...] = (), **plugin: dict[str, str]) -> list:
    target = served_target(folder / "target", family)
    head = family_head(folder / "head", target, kind)
    flags = ("--skip-server-warmup", *flags)
    algorithm = "EAGLE" if kind == "eagle2" else "EAGLE3"
    return [
        tiny_spec(target, extra_flags=flags),
        tiny_spec(
            target, head, SHAPE, extra_flags=(*flags, "--chunked-prefill-size", "64"), algorithm=algorithm, **plugin
        ),
    ]


def check_responses(plain: Server, plugin: Server) -> None:
    prompts = make_prompts(20) + [prompt * 4 for prompt in make_prompts(4)]  # these are longer than a chunk
    expected = responses(generate_all(plain, prompts, TOKENS, at_once=4))
    assert len(set(expected)) > len(prompts) * 0.8, "the target repeats itself: equality would prove little"
    for _ in range(2):  # then from the prefix cache
        answers = generate_all(plugin, prompts, TOKENS, at_once=8)
        assert responses(answers) == expected
        assert accept_length(answers) > 1.2


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("eagle2", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "family", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.matrix) for name in CHANGES]
)
def test_greedy_text_equals_plain_decoding(family: str, kind: str, tmp_path: Path) -> None:
    with serving(pair(tmp_path, family, kind, environment=OVERLAP), tmp_path / "logs") as (plain, plugin):
        check_responses(plain, plugin)


@pytest.mark.matrix
@pytest.mark.parametrize("family", SWA)
def test_freed_slots_of_sliding_windows_harm_nobody(family: str, tmp_path: Path) -> None:
    """A small cache: requests wait for slots that others' windows have left, and aborted ones give theirs back."""
    flags = ("--max-total-tokens", "1024", "--max-running-requests", "8")
    with serving(pair(tmp_path, family, "eagle3", flags=flags, environment=OVERLAP), tmp_path / "logs") as (
        plain,
        plugin,
    ):
        for number in range(20):
            with pytest.raises(httpx.TimeoutException):
                body = {"text": f"leave {number}", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
                httpx.post(f"{plugin.url}/generate", json=body, timeout=0.2, trust_env=False)
        check_responses(plain, plugin)
        assert generate(plugin, "a", 4)["meta_info"]["completion_tokens"] == 4


@pytest.mark.matrix
def test_attention_chunks_are_those_of_transformers(tmp_path: Path) -> None:
    """Prompts of more than three chunks, whose answers go on over further ones."""
    from transformers import AutoModelForCausalLM

    target, length = served_target(tmp_path / "target", "llama4_text"), 3 * CHUNK
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
