"""A seeded request says the same alone, in any batch, and again; seeds draw from the target's distribution."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gtest import p_values
from vllm import LLM
from vllm_bigram import ASYNC, OPTIONS, PROMPT, PROMPTS, TREES, Acceptance, ask, draw, tokens, write_models
from vllm_engines import chosen_by, engine, fixed_shapes

from eagle_plugin.core.shape import PLAIN
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.vllm import sampling

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 12},
    {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": 0.5},
]
SEEDS = [0, 1, -7, 2**63 - 1]
LENGTH = 32
DRAWN = 800
LONG = " ".join(PROMPTS * 2)  # more tokens than the small budget below


@pytest.fixture(scope="module")
def models(checkpoints: Path) -> tuple[Path, Path]:
    return write_models(checkpoints)


@pytest.fixture(scope="module")
def plugin(models: tuple[Path, Path]) -> Iterator[LLM]:
    target, head = models
    with engine(target, head, policy="random", **TREES, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def long(plugin: LLM) -> list[list[int]]:
    """The text of each seed after a prompt that is read at once, synchronously, beside shapes that change."""
    return alone(plugin, SETTINGS[1], LONG)


def responses(llm: LLM, settings: list[dict[str, Any]], prompt: str = PROMPT) -> list[list[int]]:
    return tokens(ask(llm, [prompt] * len(settings), settings, max_tokens=LENGTH))


def alone(llm: LLM, setting: dict[str, Any], prompt: str = PROMPT) -> list[list[int]]:
    """The text of each seed, one request after another."""
    return [responses(llm, [setting | {"seed": seed}], prompt)[0] for seed in SEEDS]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_seed_fixes_the_text_alone_and_in_a_batch(setting: dict[str, Any], plugin: LLM) -> None:
    acceptance = Acceptance(plugin)
    found = alone(plugin, setting)
    assert acceptance.length > 1.2
    assert len({tuple(text) for text in found}) == len(SEEDS)
    others = [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 1.0, "seed": 5}]
    batch = [s for seed in SEEDS for s in (setting | {"seed": seed}, *others)]
    together = responses(plugin, batch)
    assert together[:: len(others) + 1] == found
    unseeded = [tuple(text) for text in together[1 :: len(others) + 1]]
    assert len(set(unseeded)) == len(SEEDS), "requests without a seed share one"
    assert len({tuple(text) for text in together[3 :: len(others) + 1]}) == 1


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_seed_fixes_the_text_whatever_is_drafted(setting: dict[str, Any], plugin: LLM) -> None:
    """Shapes that change at random, the caps in every round, and no drafts at all."""
    found = alone(plugin, setting)
    with fixed_shapes(plugin):
        assert alone(plugin, setting) == found
    plain = ShapeChooser(PLAIN, None)
    acceptance = Acceptance(plugin)
    with chosen_by(plugin, plain):
        assert alone(plugin, setting) == found
    assert acceptance.length == 1.0


def test_choices_of_one_request_differ_and_come_again(plugin: LLM) -> None:
    """vLLM gives the choices seeds of their own, one after another."""
    setting = {"temperature": 1.0, "n": 3, "seed": 8}
    first, again = (
        [list(choice.token_ids) for choice in ask(plugin, [PROMPT], [setting], max_tokens=LENGTH)[0].outputs]
        for _ in range(2)
    )
    assert first == again
    assert len({tuple(text) for text in first}) == 3
    assert first == responses(plugin, [{"temperature": 1.0, "seed": seed} for seed in (8, 9, 10)])


def test_different_seeds_draw_from_the_targets_distribution(plugin: LLM) -> None:
    """Numbers that were not random over seeds, or shared by draft and verification, would show here."""
    seeded = np.array(responses_to_seeds(plugin, range(DRAWN)), dtype=np.int64)
    found = p_values(seeded, draw(plugin, [SETTINGS[1]], 2 * DRAWN)[0])
    assert min(found.values()) > 1e-4 / len(found), found


def responses_to_seeds(llm: LLM, seeds: range) -> list[list[int]]:
    settings = [SETTINGS[1] | {"seed": seed} for seed in seeds]
    return tokens(ask(llm, [PROMPT] * len(settings), settings, max_tokens=4))


def test_keys_without_seeds_are_noticed(plugin: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same requests with keys that know no seed."""
    monkeypatch.setattr(sampling, "key_of_seed", lambda seed: random.getrandbits(63))
    assert alone(plugin, SETTINGS[0]) != alone(plugin, SETTINGS[0])


def test_seeds_of_prompts_that_are_read_in_parts(plugin: LLM, long: list[list[int]], models: tuple[Path, Path]) -> None:
    """vLLM winds back the generator of a prompt that is not read to its end, which no generator of a CPU can."""
    target, head = models
    options = OPTIONS | {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    with engine(target, head, **TREES, **ASYNC, **options) as llm:
        assert len(ask(llm, [LONG], [{"max_tokens": 1}])[0].prompt_token_ids) > 64
        assert alone(llm, SETTINGS[1], LONG) == long
