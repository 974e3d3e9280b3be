"""Requests with LoRA adapters beside requests without: each has the text of plain decoding with its adapter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from family_models import family_head, family_target
from serving import OVERLAP, accept_length, responses, serving, tiny_spec
from tiny_adapters import write_adapter
from word_prompts import make_prompts

from eagle_plugin.bench.servers import Server

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

PROMPTS = make_prompts(12) + [prompt * 4 for prompt in make_prompts(2)]  # these are longer than a chunk
TOKENS = 32


def ask(server: Server, names: list[str | None]) -> list[dict]:
    """The greedy answer to every prompt with every adapter, all mixed, eight at a time."""

    def one(prompt: str, name: str | None) -> dict:
        parameters = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": parameters, "lora_path": name}
        return post(server, "generate", body)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, *zip(*((prompt, name) for prompt in PROMPTS for name in names), strict=True)))


def post(server: Server, path: str, body: dict) -> dict:
    answer = httpx.post(f"{server.url}/{path}", json=body, timeout=600, trust_env=False)
    answer.raise_for_status()
    return answer.json()


def test_mixed_adapters(tmp_path: Path) -> None:
    """Three adapters for two places of a batch, so that batches are split and adapters exchanged.

    One comes while the servers run, and one goes.
    """
    target = family_target(tmp_path / "target", "llama")
    head = family_head(tmp_path / "head", target)
    first, second, third = (
        write_adapter(tmp_path / f"adapter{seed}", target, rank=rank, seed=seed)
        for seed, rank in ((3, 4), (4, 8), (5, 2))
    )
    flags = ("--skip-server-warmup", "--enable-lora", "--max-loras-per-batch", "2", "--max-lora-rank", "8")
    flags += ("--lora-target-modules", "q_proj", "v_proj", "--lora-paths", f"first={first}", f"second={second}")
    plugin_flags = (*flags, "--chunked-prefill-size", "64")
    specs = [
        tiny_spec(target, extra_flags=flags),
        tiny_spec(target, head, (3, 4, 16), extra_flags=plugin_flags, environment=OVERLAP),
    ]
    with serving(specs, tmp_path / "logs") as (plain, plugin):
        for server in (plain, plugin):
            post(server, "load_lora_adapter", {"lora_name": "third", "lora_path": str(third)})
        names = [None, "first", "second", "third"]
        expected = responses(ask(plain, names))
        for i in range(len(names)):
            for j in range(i):
                same = sum(a == b for a, b in zip(expected[i :: len(names)], expected[j :: len(names)], strict=True))
                assert same < len(PROMPTS) // 2, "the adapters change too little: equality would prove nothing"
        for _ in range(2):  # then from the prefix cache
            answers = ask(plugin, names)
            assert responses(answers) == expected
            assert accept_length(answers) > 1.2
        post(plugin, "unload_lora_adapter", {"lora_name": "first"})
        assert responses(ask(plugin, [None, "third"])) == [e for i, e in enumerate(expected) if i % 4 in (0, 3)]
