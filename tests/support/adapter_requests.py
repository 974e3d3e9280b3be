"""A target with adapters, SGLang servers of it, and requests with and without them, all mixed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from family_models import family_head, family_target
from tiny_adapters import write_adapter
from word_prompts import make_prompts

from eagle_plugin.bench.servers import Server

PROMPTS = make_prompts(12) + [prompt * 4 for prompt in make_prompts(2)]  # these are longer than a chunk
TOKENS = 32
NAMES = (None, "first", "second", "third")


class Adapted(NamedTuple):
    """Three adapters of different ranks, the first two of which servers load at the start."""

    target: Path
    head: Path
    third: Path
    flags: tuple[str, ...]  # two places of a batch, so that batches are split and adapters exchanged


def adapted(folder: Path) -> Adapted:
    target = family_target(folder / "target", "llama")
    head = family_head(folder / "head", target)
    first, second, third = (
        write_adapter(folder / f"adapter{seed}", target, rank=rank, seed=seed)
        for seed, rank in ((3, 4), (4, 8), (5, 2))
    )
    flags = ("--skip-server-warmup", "--enable-lora", "--max-loras-per-batch", "2", "--max-lora-rank", "8")
    flags += ("--lora-target-modules", "q_proj", "v_proj", "--lora-paths", f"first={first}", f"second={second}")
    return Adapted(target, head, third, flags)


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/{path}", json=body, timeout=600, trust_env=False)
    answer.raise_for_status()
    return answer.json()  # type: ignore[no-any-return]


def ask(server: Server, names: Sequence[str | None] = NAMES, prompts: Sequence[str] = PROMPTS) -> list[dict[str, Any]]:
    """The greedy answer to every prompt with every adapter, all mixed, eight at a time."""

    def one(prompt: str, name: str | None) -> dict[str, Any]:
        parameters = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        return post(server, "generate", {"text": prompt, "sampling_params": parameters, "lora_path": name})

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, *zip(*((prompt, name) for prompt in prompts for name in names), strict=True)))


def check_that_adapters_count(expected: Sequence[str]) -> None:
    """Of `ask` with all names: else the adapters change too little, and equality would prove nothing."""
    for i in range(len(NAMES)):
        for j in range(i):
            pairs = zip(expected[i :: len(NAMES)], expected[j :: len(NAMES)], strict=True)
            assert sum(a == b for a, b in pairs) < len(expected) // len(NAMES) // 2
