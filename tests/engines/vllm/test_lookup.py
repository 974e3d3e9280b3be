"""Looked-up branches in vLLM: greedy text is that of plain decoding, and what is looked at is the request's own text,
whatever the scheduler does: chunks, preemption, the prefix cache, a scheduler that is ahead."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_engines import counters, engine, generate, runner
from vllm_greedy import GreedyModels, make_prompts, write_models
from vllm_mixed import check_mixed

TREES: dict[str, Any] = {"depth": 4, "topk": 3, "nodes": 16}
# What a request says twice, so that much is looked up from its first round on.
PROMPTS = [[*prompt, *prompt] for prompt in make_prompts(20, longest=45)]
MATRIX = pytest.mark.matrix
SMALL, CHUNKS = {"num_gpu_blocks_override": 20}, {"max_num_batched_tokens": 40}
CASES = [
    pytest.param("reduced", True, "random", CHUNKS, id="asynchronous, chunks"),
    pytest.param("reduced", False, "random", SMALL, id="preemption", marks=MATRIX),
    pytest.param("reduced", True, "random", SMALL, id="asynchronous, preemption", marks=MATRIX),
    pytest.param("full", False, "fixed", {"enable_prefix_caching": True}, id="prefix cache", marks=MATRIX),
    pytest.param("peagle", False, "random", {}, id="all levels at once", marks=MATRIX),
    pytest.param("eagle2", True, "random", {}, id="EAGLE-2", marks=MATRIX),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> GreedyModels:
    return write_models(tmp_path_factory.mktemp("lookup"), PROMPTS)


@pytest.mark.parametrize(("head", "asynchronous", "policy", "options"), CASES)
def test_greedy_text(
    models: GreedyModels,
    head: str,
    asynchronous: bool,
    policy: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EAGLE_LOOKUP", "on")
    plugin = {"async_scheduling": asynchronous}
    with engine(models.target, models.heads[head], policy=policy, **TREES, plugin=plugin, **options) as llm:
        assert generate(llm, PROMPTS) == models.expected
        if options is SMALL:
            assert counters(llm)["vllm:num_preemptions"] > 3
        if "enable_prefix_caching" in options:
            assert generate(llm, PROMPTS) == models.expected
            assert counters(llm)["vllm:prefix_cache_hits"] > 0
        rows = runner(llm)._lookup_rows
        proposed, accepted = rows.lookups.counts()
        assert proposed > 100 and 0 < accepted <= proposed
        check_sequences(sequences_of(rows), models.expected)
        assert len(rows._rows) <= 8, "a request that ended keeps its row"
        check_mixed(llm, PROMPTS, models.expected)


def sequences_of(rows: Any) -> list[list[int]]:
    """What the requests of the last steps, whose rows are not free yet, are taken to have tokens."""
    history, sequences = rows.lookups.history, []
    for row in rows._rows.values():
        assert int(history.begins[row]) == 0, "a part of the text was forgotten"
        sequences.append(history.tokens[row, : int(history.ends[row]) + 1].tolist())
    return sequences


def check_sequences(sequences: list[list[int]], expected: list[list[int]]) -> None:
    whole = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    assert sequences
    for text in sequences:  # the last round of a request may have accepted more than was asked for
        assert any(text[: len(tokens)] == tokens for tokens in whole)


def test_the_comparison_sees_one_token(models: GreedyModels) -> None:
    tokens = [*PROMPTS[0], *models.expected[0]]
    check_sequences([tokens], models.expected)
    with pytest.raises(AssertionError):
        check_sequences([[tokens[0] + 1, *tokens[1:]]], models.expected)
