"""Greedy requests with parameters that change the logits say what plain decoding says, at every node of a tree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny_checkpoints import EOS
from tokenizers import Tokenizer
from vllm import LLM
from vllm_bigram import ASYNC, OPTIONS, PROMPTS, TREES, Acceptance, ask, endings, tokens, write_models, write_peagle
from vllm_engines import engine

from eagle_plugin.vllm import logits

LENGTH = 40
NAMES = [
    "presence penalty",
    "frequency penalty",
    "repetition penalty",
    "all penalties",
    "bad words",
    "logit bias",
    "allowed token ids",
    "stop token ids",
    "minimal length",
    "minimal length and stop token ids",
    "everything",
]
ALONE = ("bad words", "everything")  # the others are compared in a batch of all; the matrix has each alone


class Expected(NamedTuple):
    """What plain decoding says to each of PROMPTS under each setting."""

    settings: dict[str, dict[str, Any]]
    generated: dict[str, list[tuple[Any, ...]]]


def make_settings(target: Path, free: list[list[int]]) -> dict[str, dict[str, Any]]:
    """Settings that must change the free text: they forbid, favour or end at what it says."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    pairs = {tuple(text[i : i + 2]) for text in free for i in range(3, LENGTH - 1, 5)}
    bad_words = [tokenizer.decode(list(pair)) for pair in sorted(pairs)]
    bad_words = [w for w in bad_words if len(tokenizer.encode(w, add_special_tokens=False).ids) == 2 and w == w.strip()]
    assert len(bad_words) > 3
    often = sorted({token for text in free for token in text})
    ending = {EOS: 12.2}  # the end becomes likely, after some tokens the most likely one
    settings: dict[str, dict[str, Any]] = {
        "presence penalty": {"presence_penalty": 0.9},
        "frequency penalty": {"frequency_penalty": 0.5},
        "repetition penalty": {"repetition_penalty": 1.3},
        "all penalties": {"presence_penalty": -0.4, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
        "bad words": {"bad_words": bad_words},
        "logit bias": {"logit_bias": {token: (-1) ** i * 0.6 * (i % 4) for i, token in enumerate(often)}},
        "allowed token ids": {"allowed_token_ids": often[::2]},
        "stop token ids": {"stop_token_ids": often[1::3]},
        "minimal length": {"min_tokens": 13, "ignore_eos": False, "logit_bias": {EOS: 100.0}},
        "minimal length and stop token ids": {
            "min_tokens": 9,
            "ignore_eos": False,
            "stop_token_ids": often[::5],
            "logit_bias": ending,
        },
        "everything": {
            "presence_penalty": 0.3,
            "frequency_penalty": 0.2,
            "repetition_penalty": 0.9,
            "bad_words": bad_words[::2],
            "logit_bias": {often[0]: 1.0, often[-1]: -1.0} | ending,
            "min_tokens": 7,
            "ignore_eos": False,
            "allowed_token_ids": [EOS, *often[1:]],
        },
    }
    assert list(settings) == NAMES
    return settings


@pytest.fixture(scope="module")
def models(checkpoints: Path) -> tuple[Path, Path]:
    return write_models(checkpoints)


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path]) -> Expected:
    with engine(models[0], **OPTIONS) as plain:
        free = ask(plain, PROMPTS, [{}] * len(PROMPTS))
        settings = make_settings(models[0], tokens(free))
        generated = {name: endings(ask(plain, PROMPTS, [s] * len(PROMPTS))) for name, s in settings.items()}
    for name in NAMES:  # what changes nothing would test nothing
        changed = [ours != theirs for ours, theirs in zip(generated[name], endings(free), strict=True)]
        assert sum(changed) > len(PROMPTS) // 2, name
    return Expected(settings, generated)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("synchronous", marks=pytest.mark.matrix),
        pytest.param("levels at once", marks=pytest.mark.matrix),  # a P-EAGLE head; test_parallel_heads.py has less
        "asynchronous",
    ],
)
def plugin(request: pytest.FixtureRequest, checkpoints: Path, expected: Expected) -> Iterator[LLM]:
    target, head = (write_peagle if request.param == "levels at once" else write_models)(checkpoints)
    more = ASYNC | {"policy": "fixed"} if request.param == "asynchronous" else {"policy": "random"}
    with engine(target, head, **TREES, **OPTIONS, **more) as llm:
        yield llm


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALONE else pytest.mark.matrix) for name in NAMES]
)
def test_greedy_text_is_that_of_plain_decoding(name: str, plugin: LLM, expected: Expected) -> None:
    acceptance = Acceptance(plugin)
    answers = ask(plugin, PROMPTS, [expected.settings[name]] * len(PROMPTS))
    assert endings(answers) == expected.generated[name]
    assert acceptance.length > 1.2, "hardly a draft was accepted"


def test_all_settings_in_one_batch(plugin: LLM, expected: Expected) -> None:
    """With sampled requests between them."""
    sampled = {"temperature": 1.0, "frequency_penalty": 0.3, "min_p": 0.05}
    turns = [(prompt, name) for prompt in PROMPTS for name in NAMES]
    settings = [s for _, name in turns for s in (expected.settings[name], sampled)]
    acceptance = Acceptance(plugin)
    answers = ask(plugin, [prompt for prompt, _ in turns for _ in range(2)], settings)
    assert acceptance.length > 1.2, "hardly a draft was accepted"
    found = endings(answers[::2])
    for i, name in enumerate(NAMES):
        assert found[i :: len(NAMES)] == expected.generated[name], name


# ---------------------------------------------------------------------------------------------------------------------
# Controls: what the comparison above must notice.


def output_only(outputs: list[list[int]], tree: Any, rows: logits.NodeRows) -> list[list[int]]:
    """Histories without the drafted tokens on the path to a node."""
    return [outputs[i] for i in rows.requests.tolist()]


def test_histories_without_the_path_are_noticed(
    plugin: LLM, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties seldom decide over three tokens in a row: tests/engines/vllm/test_sampling_nodes.py has them."""
    monkeypatch.setattr(logits, "_histories", output_only)
    answers = ask(plugin, PROMPTS, [expected.settings["bad words"]] * len(PROMPTS))
    assert endings(answers) != expected.generated["bad words"]
