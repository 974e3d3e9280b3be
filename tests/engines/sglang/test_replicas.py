"""Two replicas of one SGLang server (--dp-size 2) give text and distribution of one, and draw unlike each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import broken_verifier
import httpx
import pytest
from family_draws import check_distribution
from sampling_requests import SHAPE
from serving import OVERLAP, accept_length, generate_all, responses, serving, tiny_spec
from word_prompts import make_prompts

from eagle_plugin.bench.servers import Server

pytest.importorskip("sglang")
pytestmark = [pytest.mark.server, pytest.mark.matrix]

TOKENS = 48
FLAGS = ("--skip-server-warmup", *("--dp-size", "2"), "--enable-metrics")


def ask(server: Server, replica: int, prompt: str, **sampling: Any) -> dict[str, Any]:
    parameters = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True} | sampling
    body = {"text": prompt, "sampling_params": parameters, "routed_dp_rank": replica}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=600, trust_env=False)
    answer.raise_for_status()
    return answer.json()


def test_text_and_distribution_are_those_of_one(tmp_path: Path, bigram_target: Path, bigram_eagle3: Path) -> None:
    faults = tmp_path / "plugins"  # the control of the distribution
    environment = OVERLAP | {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"} | broken_verifier.install(faults)
    replicas = tiny_spec(bigram_target, bigram_eagle3, SHAPE, extra_flags=FLAGS, environment=environment)
    prompts = make_prompts(12)
    with serving([tiny_spec(bigram_target), replicas], tmp_path) as (plain, server):
        expected = responses(generate_all(plain, prompts, TOKENS, at_once=4))
        for replica in range(2):
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda prompt, of=replica: ask(server, of, prompt), prompts))
            assert responses(answers) == expected
            assert accept_length(answers) > 1.1
        # Each replica's first requests without a seed of their own, whose keys both draw from the server's seed.
        first, second = ([ask(server, of, "tree root", temperature=1.0)["text"] for _ in range(3)] for of in range(2))
        assert len({*first, *second}) == 6
        check_distribution(plain, server, faults, [{"temperature": 1.0}, {"temperature": 0.5}])
