"""Sampled text has exactly the distribution of plain decoding; vLLM's own chain and broken verifiers are found out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import broken_verifier
import numpy as np
import pytest
from gtest import p_values
from numpy.typing import NDArray
from vllm import LLM
from vllm.exceptions import VLLMValidationError
from vllm_bigram import ASYNC, OPTIONS, PROMPT, TREES, Acceptance, ask, draw, write_models, write_peagle
from vllm_engines import engine

from eagle_plugin.runtime import accept

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.8, "top_p": 0.85},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 6, "top_p": 0.7},
    {"temperature": 1.2, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {
        "temperature": 0.8,
        "top_p": 0.95,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {87: 0.8},  # a token that is generated often, and so penalised often
    },
]
ALONE = (1, 2, 3)  # those with one parameter that others have beside more: in the matrix only
GREEDY = {"temperature": 0.0}
REQUESTS = 800  # a setting
MANY = 4000
VIEWS = 6
LEAST_P = 1e-4 / (VIEWS * 2 * len(SAMPLING))  # right samplers fail one of these tests once in 10,000 runs


@pytest.fixture(scope="module")
def models(checkpoints: Path) -> tuple[Path, Path]:
    return write_models(checkpoints)


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path], request: pytest.FixtureRequest) -> dict[int, NDArray[np.int64]]:
    """Sequences [2 * REQUESTS, 4] of plain decoding by the place in SAMPLING; at -1 the greedy one."""
    left = ALONE if "not matrix" in request.config.option.markexpr else ()
    settings = {i: setting for i, setting in enumerate(SAMPLING) if i not in left}
    with engine(models[0], **OPTIONS) as plain:
        drawn = draw(plain, list(settings.values()), 2 * REQUESTS)
        return dict(zip(settings, drawn, strict=True)) | {-1: draw(plain, [GREEDY], 1)[0]}


# test_parallel_heads.py has the short form for heads that draft all levels at once.
@pytest.fixture(scope="module", params=["levels one by one", pytest.param("levels at once", marks=pytest.mark.matrix)])
def plugin(request: pytest.FixtureRequest, checkpoints: Path, expected: dict[int, NDArray[np.int64]]) -> Iterator[LLM]:
    target, head = (write_peagle if request.param == "levels at once" else write_models)(checkpoints)
    with engine(target, head, policy="random", **TREES, **OPTIONS) as llm:
        yield llm


def test_sampled_text_has_the_distribution_of_plain_decoding(
    plugin: LLM, expected: dict[int, NDArray[np.int64]]
) -> None:
    """All settings in one batch, greedy requests among them; the shape of the trees changes from round to round."""
    settings = [[*SAMPLING, GREEDY][i] for i in expected]
    drawn = draw(plugin, settings, REQUESTS)
    for setting, ours, theirs in zip(settings, drawn, expected.values(), strict=True):
        found = p_values(ours, theirs)
        assert len(found) == VIEWS
        assert min(found.values()) > LEAST_P, (setting, found)
    assert (drawn[-1] == expected[-1]).all()


@pytest.mark.matrix
def test_requests_without_drafts(
    plugin: LLM, expected: dict[int, NDArray[np.int64]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside others with drafts; the control is a verifier that is broken for both."""
    off = {"extra_args": {"eagle_plugin": {"draft": False}}}
    settings = [SAMPLING[1] | off, SAMPLING[1], SAMPLING[3] | off]
    for ours, number in zip(draw(plugin, settings, REQUESTS), (1, 1, 3), strict=True):
        assert min(p_values(ours, expected[number]).values()) > LEAST_P
    monkeypatch.setattr(accept, "verify_tree", broken_verifier.FAULTS["temperature one"])
    found = p_values(draw(plugin, settings[:2], REQUESTS)[0], expected[1])
    assert min(found.values()) < LEAST_P**2, found


@pytest.mark.parametrize(
    "setting",
    [pytest.param(one, marks=pytest.mark.matrix if i in ALONE else ()) for i, one in enumerate(SAMPLING)],
)
def test_drafts_are_accepted_under_every_setting(setting: dict[str, Any], plugin: LLM) -> None:
    """Were they not, the test above would say little about trees."""
    acceptance = Acceptance(plugin)
    ask(plugin, [PROMPT] * 16, [setting] * 16, max_tokens=24)
    assert acceptance.length > 1.4


def sglangs_filters(*arguments: Any, filters: str) -> Any:
    return broken_verifier.healthy(*arguments, filters="joint")


@pytest.mark.parametrize(
    "fault, number",
    [
        pytest.param("temperature one", 1, marks=pytest.mark.matrix),
        pytest.param("no filters", 2, marks=pytest.mark.matrix),
        ("no filters", 4),
        ("SGLang's filters", 5),
        ("every draft accepted", 0),
        ("one key for all", 0),
    ],
)
def test_a_broken_verifier_is_found_out(
    fault: str,
    number: int,
    plugin: LLM,
    expected: dict[int, NDArray[np.int64]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under shapes that change at random."""
    faults = broken_verifier.FAULTS | {"SGLang's filters": sglangs_filters}
    monkeypatch.setattr(accept, "verify_tree", faults[fault])
    found = p_values(draw(plugin, [SAMPLING[number]], REQUESTS)[0], expected[number])
    assert min(found.values()) < LEAST_P**2, found


@pytest.mark.matrix
def test_vllms_own_chain_is_found_out(models: tuple[Path, Path], expected: dict[int, NDArray[np.int64]]) -> None:
    """On a CPU its temperatures are uninitialised memory, while its greedy text is right; and it refuses two parameters
    that the plugin serves."""
    target, head = models
    with engine(target, head, chain=True, nodes=4, **OPTIONS) as chain:
        drawn = draw(chain, [SAMPLING[0]], REQUESTS)[0]
        greedy = draw(chain, [GREEDY], 1)[0]
        for refused in ({"min_p": 0.1, "temperature": 1.0}, {"logit_bias": {87: 1.0}}):
            with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
                ask(chain, [PROMPT], [refused])
    assert (greedy == expected[-1]).all()
    found = p_values(drawn, expected[0])
    assert min(found.values()) < LEAST_P**2, found


@pytest.fixture(scope="module")
def many(models: tuple[Path, Path]) -> list[NDArray[np.int64]]:
    """The same of some settings, of many requests."""
    with engine(models[0], **OPTIONS) as plain:
        return draw(plain, SAMPLING[::6], 2 * MANY)


@pytest.mark.matrix
@pytest.mark.parametrize("write", [write_models, write_peagle])
@pytest.mark.parametrize("policy", ["fixed", "random"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_tree_rounds_keep_the_distribution(
    asynchronous: bool, policy: str, write: Any, checkpoints: Path, many: list[NDArray[np.int64]]
) -> None:
    """Under load the policy hardly drafts: here trees are drafted whatever they cost."""
    target, head = write(checkpoints)
    plugin = {"async_scheduling": asynchronous}
    with engine(target, head, **TREES, **OPTIONS, plugin=plugin, policy=policy) as llm:
        acceptance = Acceptance(llm)
        drawn = draw(llm, SAMPLING[::6], MANY)
        assert acceptance.length > 1.3
    for ours, theirs in zip(drawn, many, strict=True):
        found = p_values(ours, theirs)
        assert min(found.values()) > LEAST_P, found


@pytest.mark.matrix
def test_async_scheduling_keeps_the_distribution(
    models: tuple[Path, Path], expected: dict[int, NDArray[np.int64]]
) -> None:
    target, head = models
    with engine(target, head, **TREES, **ASYNC, **OPTIONS) as llm:
        drawn = draw(llm, [*SAMPLING[::3], GREEDY], REQUESTS // 2)
    for number, ours in zip((*range(0, len(SAMPLING), 3), -1), drawn, strict=True):
        found = p_values(ours, expected[number])
        assert min(found.values()) > LEAST_P, (number, found)
