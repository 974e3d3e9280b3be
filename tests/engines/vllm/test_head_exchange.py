"""Another head in the place of the served one while requests run: their responses stay, their accept lengths change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trained_heads import Weights, rewrite
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm_engines import counters, engine, generate, runner
from vllm_greedy import VOCAB, write_heads, write_target

from eagle_plugin.heads.files import HeadError
from eagle_plugin.vllm.head_exchange import exchange_head

DICE = random.Random(5)
PROMPTS = [DICE.choices(range(3, VOCAB), k=9 + 7 * i) for i in range(4)]
SETTINGS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exchange")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return write_target(folder)


@pytest.fixture(
    scope="module", params=["reduced", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("eagle2", "peagle"))]
)
def heads(request: pytest.FixtureRequest, folder: Path, target: Path) -> tuple[Path, Path]:
    """A head whose drafts are never right, and a good one of the same form."""
    made = folder / request.param
    made.mkdir()
    good = write_heads(made, target)[request.param]

    def other_way(weights: Weights) -> Weights:
        return {
            name: -w if name.endswith(("down_proj.weight", "o_proj.weight", "fc.weight")) else w
            for name, w in weights.items()
        }

    return rewrite(good, made / "bad", weights=other_way), good


@pytest.fixture
def llm(target: Path, heads: tuple[Path, Path]) -> Iterator[LLM]:
    with engine(target, heads[0], depth=3, topk=3, nodes=12) as made:
        yield made


def accepted_per_round(llm: LLM, before: dict[str, float]) -> float:
    now = counters(llm)
    more = {name: now[name] - before.get(name, 0.0) for name in now}
    return more["vllm:spec_decode_num_accepted_tokens"] / more["vllm:spec_decode_num_drafts"]


def test_a_head_that_cannot_be_loaded_leaves_the_served_one(
    target: Path, heads: tuple[Path, Path], llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another form, damaged weights, and an error in the middle of loading."""
    served = runner(llm)
    model, wanted = served.drafter.model, generate(llm, PROMPTS, max_tokens=20)
    for key, value, reason in (("intermediate_size", 999, "of shape"), ("rms_norm_eps", 0.5, "rms_norm_eps 0.5 in")):
        other = folder / f"{heads[0].parent.name}-{key}"
        if not other.exists():
            rewrite(heads[1], other, config=lambda config, key=key, value=value: config | {key: value})
        with pytest.raises(HeadError, match=reason):
            exchange_head(served, other)
    load = type(served.drafter).load_model

    def half(drafter: Any, target_model: Any) -> None:
        load(drafter, target_model)
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(type(served.drafter), "load_model", half)
        with pytest.raises(MemoryError):
            exchange_head(served, heads[1])
    assert served.drafter.model is model and generate(llm, PROMPTS, max_tokens=20) == wanted
    captured: list[Any] = []

    def fail_at_first(of: Any) -> None:
        captured.append(of.drafter.model)
        if len(captured) == 1:
            raise MemoryError("no room for graphs")

    with monkeypatch.context() as patched:
        patched.setattr(type(served), "capture_steps", fail_at_first)
        with pytest.raises(MemoryError):
            exchange_head(served, heads[1])
    assert captured[0] is not model and captured[1:] == [model]
    assert served.vllm_config.speculative_config.model == str(heads[0])
    assert served.drafter.model is model and generate(llm, PROMPTS, max_tokens=20) == wanted
    exchange_head(served, heads[1])
    assert served.drafter.model is not model and generate(llm, PROMPTS, max_tokens=20) == wanted


def test_responses_stay_and_accept_lengths_change(target: Path, heads: tuple[Path, Path], llm: LLM) -> None:
    bad, good = heads
    before = counters(llm)
    wanted = generate(llm, PROMPTS, max_tokens=60)
    with_bad = accepted_per_round(llm, before)
    for i, prompt in enumerate(PROMPTS):
        llm.llm_engine.add_request(str(i), TokensPrompt(prompt_token_ids=prompt), SETTINGS)
    for _ in range(8):
        llm.llm_engine.step()
    exchange_head(runner(llm), good)
    found: dict[int, list[int]] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                found[int(output.request_id)] = list(output.outputs[0].token_ids)
    plain = [found[i] for i in range(len(PROMPTS))]
    before = counters(llm)
    assert generate(llm, PROMPTS, max_tokens=60) == wanted
    with_good = accepted_per_round(llm, before)
    assert with_good > with_bad + 0.3
    assert [len(text) for text in plain] == [60] * len(PROMPTS)
    assert all(text[: len(part)] == part for text, part in zip(plain, wanted, strict=True))
