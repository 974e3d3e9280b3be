"""Thinking budgets: a request that has one has trees until its thoughts may end, which is as in plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from vllm_bigram import ASYNC, OPTIONS, PROMPTS, TREES, Acceptance, ask, tokens, write_models
from vllm_engines import engine

from eagle_plugin.vllm import logits, verifier

# The target says "`!" by itself after some prompts, and never "so.".
START, END = "`!", "so."
CONFIG = {"reasoning_config": {"reasoning_start_str": START, "reasoning_end_str": END}}
ASKED = [*PROMPTS, *(START + prompt for prompt in PROMPTS)]  # some think before their first token
BUDGETS = [0, 1, 2, 3, 7, 12, 21]
PENALTY = {"frequency_penalty": 0.3}
LARGE = [{"thinking_token_budget": 28}] * len(ASKED)


@pytest.fixture(scope="module")
def models(checkpoints: Path) -> tuple[Path, Path]:
    return write_models(checkpoints)


def settings(**more: Any) -> list[dict[str, Any]]:
    """One for each of ASKED, a request without a budget after every two with one."""
    given = [{"thinking_token_budget": BUDGETS[i % len(BUDGETS)]} for i in range(len(ASKED))]
    return [more | (budget if i % 3 < 2 else {}) for i, budget in enumerate(given)]


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path]) -> list[list[list[int]]]:
    """Plain decoding's text: with budgets, with budgets and a penalty, and free; all of one length (see the moves)."""
    with engine(models[0], **OPTIONS, **CONFIG) as plain:
        kinds = (settings(), settings(**PENALTY), [{}] * len(ASKED), LARGE)
        found = [tokens(ask(plain, ASKED, given)) for given in kinds]
        end = plain.get_tokenizer().encode(END, add_special_tokens=False)
    assert len(end) == 3
    forced, _, free, large = (
        [any(t[i : i + 3] == end for i in range(len(t))) for t in responses] for responses in found
    )
    assert sum(forced) >= len(ASKED) // 2
    assert sum(large) >= len(ASKED) // 4 and not any(free)
    return found


@pytest.fixture(scope="module", params=["synchronous", pytest.param("asynchronous", marks=pytest.mark.matrix)])
def plugin(request: pytest.FixtureRequest, models: tuple[Path, Path], expected: list[list[list[int]]]) -> Iterator[LLM]:
    target, head = models
    more = ASYNC if request.param == "asynchronous" else {"policy": "random"}
    with engine(target, head, **TREES, **more, **OPTIONS, **CONFIG) as llm:
        yield llm


def test_budgets_end_thoughts_where_plain_decoding_does(plugin: LLM, expected: list[list[list[int]]]) -> None:
    acceptance = Acceptance(plugin)
    assert tokens(ask(plugin, ASKED, settings())) == expected[0]
    assert acceptance.length > 1.1, "requests without a budget have trees"
    assert tokens(ask(plugin, ASKED, settings(**PENALTY))) == expected[1]


def test_a_budget_ends_with_its_request(plugin: LLM, expected: list[list[list[int]]]) -> None:
    """In vLLM itself a request that moves to the place of a finished one inherits the budget of that one."""
    lengths = [4 + 7 * i % 37 for i in range(len(ASKED))]
    given = [setting | {"max_tokens": length} for setting, length in zip(settings(), lengths, strict=True)]
    wanted = [text[:length] for text, length in zip(expected[0], lengths, strict=True)]
    assert tokens(ask(plugin, ASKED, given)) == wanted


def test_requests_after_them_have_trees_again(plugin: LLM, expected: list[list[list[int]]]) -> None:
    acceptance = Acceptance(plugin)
    assert tokens(ask(plugin, ASKED, [{}] * len(ASKED))) == expected[2]
    assert acceptance.length > 1.4


def test_forgotten_budgets_are_noticed(
    plugin: LLM, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "force_ends", lambda *arguments: None)
    assert tokens(ask(plugin, ASKED, settings())) != expected[0]


def test_trees_before_the_end_of_a_budget(plugin: LLM, expected: list[list[list[int]]]) -> None:
    """All requests have a budget, and most of their rounds are far from its end."""
    acceptance = Acceptance(plugin)
    assert tokens(ask(plugin, ASKED, LARGE)) == expected[3]
    assert acceptance.length > 1.3


def test_trees_over_the_end_of_a_budget_are_noticed(
    plugin: LLM, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the end is forced at roots, and nodes below them go on thinking."""
    monkeypatch.setattr(verifier, "plain_requests", lambda *arguments: [])
    assert tokens(ask(plugin, ASKED, settings())) != expected[0]


def test_budgets_that_nobody_follows_are_noticed(
    plugin: LLM, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "follow_budgets", lambda *arguments: None)
    assert tokens(ask(plugin, ASKED, settings())) != expected[0]
