"""Stock SGLang on this CPU: plain decoding and its own EAGLE-3 worker, both on our kernels, give the same text."""

from __future__ import annotations

import httpx
import pytest
from serving import generate_all, serving, tiny_spec

pytest.importorskip("sglang")
pytestmark = [pytest.mark.server, pytest.mark.matrix]

SHARED = "The committee met on a cold morning in November to discuss the new rules about trees and"
PROMPTS = [
    "a",
    "hello",
    "def build_tree(parents):",
    "zebra crossing " * 12,
    SHARED,
    SHARED + " branches",
    SHARED + " branches and leaves",
    SHARED + " roots",
    *(f"prompt number {i} about draft trees" for i in range(4)),
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory, tiny_target, tiny_eagle3):
    alone = {"environment": {"SGLANG_PLUGINS": "eagle_sglang_cpu"}}  # the engine's own worker, not ours
    specs = [
        tiny_spec(tiny_target, **alone),
        tiny_spec(tiny_target, tiny_eagle3, (3, 4, 8), mode="builtin", **alone),
    ]
    with serving(specs, tmp_path_factory.mktemp("stock")) as running:
        yield running


def test_no_flag_is_needed_for_attention(servers):
    for server in servers:
        info = httpx.get(f"{server.url}/server_info", timeout=60, trust_env=False).json()
        assert info["attention_backend"] == "intel_amx"
        log = server.log_text()
        assert "fallback to torch_native" not in log
        assert "Failed to apply hooks" not in log and "Failed to execute general plugin" not in log


def test_greedy_text_with_draft_trees_equals_plain_decoding(servers):
    plain, eagle3 = servers
    expected = [answer["output_ids"] for answer in generate_all(plain, PROMPTS, 32, at_once=1)]
    assert len(set(map(tuple, expected))) == len(PROMPTS)
    for at_once in (1, 6):  # the second round also meets the prefix cache of the first
        answers = generate_all(eagle3, PROMPTS, 32, at_once)
        assert [answer["output_ids"] for answer in answers] == expected
        assert all(answer["meta_info"]["spec_verify_ct"] > 0 for answer in answers)
    answers = generate_all(plain, PROMPTS, 32, at_once=6)
    assert [answer["output_ids"] for answer in answers] == expected
