"""Two engines of one vLLM server (--data-parallel-size 2) give the text of one, whatever each has to do.

Engines of a target without experts have nothing to do with each other. Those of a target with experts exchange the
tokens of every forward: an engine without requests runs forwards of nothing beside the trees of the other.
"""

from __future__ import annotations

import json
from pathlib import Path

import bigram_models
import pytest
from family_models import family_head, family_target
from vllm_cpu_experts import EXTENSION, complete
from vllm_data_parallel import Ask, Engines, engines, rounds_of
from vllm_engines import engine, generate
from vllm_greedy import make_prompts as bigram_prompts
from vllm_requests import make_prompts

from eagle_plugin.common.deploy_folder import FOLDER, SERVER
from eagle_plugin.vllm.parallel_support import engines_exchange_tokens

TOKENS = 40
PROMPTS = make_prompts(12)
BIGRAM_PROMPTS = bigram_prompts(12)

pytestmark = pytest.mark.matrix


def expected_of(target: Path, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """What one plain engine says."""
    with engine(target) as plain:
        answers = generate(plain, prompts, max_tokens=TOKENS)
    assert len({tuple(text) for text in answers}) > len(prompts) * 0.8
    return answers


def check_responses(served: Engines, expected: list[list[int]], prompts: list[list[int]] = PROMPTS) -> None:
    """While the other engine has nothing to do; then requests of both, which end at different times."""
    for busy in range(2):
        assert served.answer([Ask(busy, prompt, TOKENS) for prompt in prompts]) == expected
    lens = [5 + 3 * i for i in range(len(prompts))]
    asked = [Ask(i % 2, prompt, n) for i, (prompt, n) in enumerate(zip(prompts, lens, strict=True))]
    assert served.answer(asked) == [text[:n] for text, n in zip(expected, lens, strict=True)]


def test_engines_without_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = bigram_models.bigram_target(tmp_path / "target", noise=0.02)
    head = bigram_models.bigram_eagle3_head(tmp_path / "head", target, wrong=0.3)
    (tmp_path / "deploy").mkdir(mode=0o700)
    monkeypatch.setenv(FOLDER, str(tmp_path / "deploy"))
    expected = expected_of(target, BIGRAM_PROMPTS)
    with engines(target, head, policy="auto") as served:
        check_responses(served, expected, BIGRAM_PROMPTS)
        # Without seeds of their own the requests of two engines draw differently, and alike within neither.
        drawn = served.answer([Ask(i % 2, BIGRAM_PROMPTS[0], TOKENS, {"temperature": 1.0}) for i in range(8)])
        assert len({tuple(text) for text in drawn}) == 8
        # Each engine counts for itself.
        for number in range(2):
            counted = rounds_of(number)
            assert counted.pop("verified") > 20 and sum(counted.values()) > 20
        assert "several ranks" in json.loads((tmp_path / "deploy" / SERVER).read_text())["refuses"]


@pytest.mark.parametrize(
    ("family", "expert_parallel", "is_async", "policy"),
    [("qwen3_moe", False, True, "random"), ("qwen3_moe", True, False, "auto"), ("gpt_oss", True, True, "random")],
)
def test_engines_that_share_experts(
    family: str, expert_parallel: bool, is_async: bool, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with a half of every expert, or with half of the experts. A policy measures at the start, after a test of
    the round."""
    if policy == "auto":
        monkeypatch.setenv("EAGLE_SELFTEST", "1")
    assert not engines_exchange_tokens(), "vLLM exchanges tokens by itself: this needs no help"
    complete(monkeypatch)
    target = family_target(tmp_path / "target", family)
    head = family_head(tmp_path / "head", target)
    expected = expected_of(target)
    shared = {"enable_expert_parallel": expert_parallel, "worker_extension_cls": EXTENSION}
    with engines(target, head, policy=policy, plugin={"async_scheduling": is_async}, **shared) as served:
        check_responses(served, expected)
        assert all(rounds_of(number)["verified"] > 20 for number in range(2))
