"""Greedy text of draft trees is that of plain decoding whatever the scheduler does: chunks, cut trees, preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trained_heads import rewrite
from vllm_engines import counters, engine, generate, requests_of, rounds, runner
from vllm_greedy import GreedyModels, make_prompts, write_models

TREES: dict[str, Any] = {"depth": 3, "topk": 4, "nodes": 16}
PROMPTS = [*make_prompts(16, longest=150), *(prompt[:6] for prompt in make_prompts(24, seed=9))]
MATRIX = pytest.mark.matrix


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> GreedyModels:
    return write_models(tmp_path_factory.mktemp("scheduling"), PROMPTS)


@pytest.mark.parametrize(
    ("asynchronous", "policy"),
    [
        pytest.param(False, "fixed", marks=MATRIX),
        pytest.param(True, "fixed", marks=MATRIX),
        (True, "random"),
    ],
)
def test_chunks_and_cut_trees(models: GreedyModels, asynchronous: bool, policy: str) -> None:
    """Eight trees want 128 rows per step; what is left of 40 goes to the last tree, or to a part of a prompt."""
    plugin = {"async_scheduling": asynchronous}
    with engine(
        models.target, models.heads["reduced"], policy=policy, **TREES, plugin=plugin, max_num_batched_tokens=40
    ) as llm:
        assert generate(llm, PROMPTS) == models.expected
        drafted = counters(llm)["vllm:spec_decode_num_draft_tokens"] / rounds(llm).count
        assert drafted < TREES["nodes"] - 2  # trees were cut short; at random shapes many are small


def test_a_request_longer_than_the_head_serves(models: GreedyModels, tmp_path: Path) -> None:
    """vLLM asks for no drafts then, and would have zeros verified in their place, of every request of the batch."""
    head = rewrite(
        models.heads["reduced"], tmp_path / "short", config=lambda config: config | {"max_position_embeddings": 128}
    )
    short, long = (choose(range(len(PROMPTS)), key=lambda i: len(PROMPTS[i])) for choose in (min, max))
    assert len(PROMPTS[short]) < 100 and len(PROMPTS[long]) > 128
    with engine(models.target, head, **TREES) as llm:
        drafted = []
        for asked in ([short], [short, long]):
            assert generate(llm, [PROMPTS[i] for i in asked]) == [models.expected[i] for i in asked]
            drafted.append(counters(llm)["vllm:spec_decode_num_draft_tokens"])
    assert drafted[0] > 0 and drafted[1] == drafted[0]


@pytest.mark.parametrize("asynchronous", [pytest.param(False, id="sync"), pytest.param(True, id="async", marks=MATRIX)])
def test_preemption(models: GreedyModels, asynchronous: bool) -> None:
    """A cache too small for eight requests: some are thrown out in the middle and start again later."""
    plugin = {"async_scheduling": asynchronous}
    with engine(
        models.target, models.heads["reduced"], policy="random", **TREES, plugin=plugin, num_gpu_blocks_override=20
    ) as llm:
        assert generate(llm, PROMPTS) == models.expected
        assert counters(llm)["vllm:num_preemptions"] > 5
        assert not runner(llm)._store._found.keys() - requests_of(llm)
