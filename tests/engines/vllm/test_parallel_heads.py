"""Text of P-EAGLE heads in vLLM: greedy text is that of plain decoding, sampled text has its distribution.

test_parallel_drafts.py has what is drafted; the matrix runs the tests of sampling, grammars and parameters whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import broken_verifier
import pytest
from bigram_models import spoken
from gtest import p_values
from peagle_models import peagle_head
from vllm import LLM
from vllm.sampling_params import StructuredOutputsParams
from vllm_bigram import OPTIONS, PROMPT, PROMPTS, Acceptance, ask, draw, endings, tokens, write_peagle
from vllm_engines import accept_length, engine, fixed_shapes, generate, random_shapes, rounds, runner
from vllm_greedy import Reference, make_prompts, write_heads, write_target

from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.shapes import shapes_within
from eagle_plugin.runtime import accept

# ---------------------------------------------------------------------------------------------------------------------
# Greedy text

MATRIX = pytest.mark.matrix
TEXT = 40  # tokens of an answer
ASKED = make_prompts(24)
COUNTED = [prompt for prompt in ASKED if len(prompt) > 1][:8]


class Greedy(NamedTuple):
    target: Path
    head: Path
    answers: dict[tuple[int, ...], list[int]]  # of plain decoding, longer than TEXT
    reference: Reference

    def expected(self, prompts: list[list[int]]) -> list[list[int]]:
        return [self.answers[tuple(prompt)][:TEXT] for prompt in prompts]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Greedy:
    folder = tmp_path_factory.mktemp("greedy")
    target = write_target(folder)
    head = write_heads(folder, target)["peagle"]
    with engine(target) as llm:
        answers = generate(llm, ASKED, max_tokens=TEXT + 6)
    by_prompt = {tuple(prompt): answer for prompt, answer in zip(ASKED, answers, strict=True)}
    return Greedy(target, head, by_prompt, Reference(target, [head]))


@pytest.mark.parametrize(
    "shape", [pytest.param((4, 1, 5), id="chain", marks=MATRIX), pytest.param((5, 3, 16), id="tree")]
)
def test_greedy_text_equals_plain_decoding(shape: tuple[int, int, int], models: Greedy) -> None:
    """In as many rounds as the reference decoder needs; and whatever the shapes."""
    depth, topk, nodes = shape
    answers = [models.answers[tuple(prompt)] for prompt in COUNTED]
    with engine(models.target, models.head, depth=depth, topk=topk, nodes=nodes) as llm:
        assert generate(llm, COUNTED, max_tokens=TEXT) == models.expected(COUNTED)
        assert rounds(llm) == models.reference.rounds(models.head, COUNTED, answers, TEXT, *shape)
        assert accept_length(llm) > 1.3
        with random_shapes(llm) as counts:
            assert generate(llm, ASKED, max_tokens=TEXT) == models.expected(ASKED)
        assert len(counts) > len(shapes_within(Shape(*shape))) // 2


@pytest.mark.parametrize(
    ("layers", "shape"),
    [pytest.param(4, (16, 1, 17), id="16 levels", marks=MATRIX), pytest.param(2, (9, 8, 64), id="64 slots")],
)
def test_greedy_text_at_the_limits(layers: int, shape: tuple[int, int, int], models: Greedy, tmp_path: Path) -> None:
    """Of levels, and of the slots that these read, (depth - 1) * topk; heads of other numbers of layers."""
    head = peagle_head(tmp_path / "head", models.target, spoken(models.target), wrong=0.2, layers=layers)
    depth, topk, nodes = shape
    prompts = COUNTED[:4]
    answers = [models.answers[tuple(prompt)] for prompt in prompts]
    reference = Reference(models.target, [head])
    with engine(models.target, head, depth=depth, topk=topk, nodes=nodes) as llm:
        assert generate(llm, prompts, max_tokens=TEXT - 16) == [answer[: TEXT - 16] for answer in answers]
        assert rounds(llm) == reference.rounds(head, prompts, answers, TEXT - 16, *shape)
        assert accept_length(llm) > 1.3


@pytest.mark.parametrize("policy", [pytest.param("fixed", marks=MATRIX), "random"])
def test_asynchronous_scheduling(policy: str, models: Greedy) -> None:
    options: dict[str, Any] = {"depth": 4, "topk": 3, "nodes": 12, "plugin": {"async_scheduling": True}}
    with engine(models.target, models.head, policy=policy, **options) as llm:
        assert generate(llm, ASKED, max_tokens=TEXT) == models.expected(ASKED)
        assert accept_length(llm) > (1.3 if policy == "fixed" else 1.15)


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=MATRIX), True])
def test_fewer_levels_than_were_asked_for(is_async: bool, models: Greedy, tmp_path: Path) -> None:
    """A head whose record names two levels drafts two, also where the first steps have rows for more drafts."""
    head = tmp_path / "head"
    head.mkdir()
    for file in models.head.iterdir():
        (head / file.name).write_bytes(file.read_bytes())
    record = {"format": 1, "kind": "peagle", "aux_layers": [2, 3, 4], "target": {}}
    record["training"] = {"recipe": {"phases": [{"steps": 2}]}}
    (head / "eagle_plugin.json").write_text(json.dumps(record))
    options: dict[str, Any] = {"depth": 4, "topk": 2, "nodes": 12, "plugin": {"async_scheduling": is_async}}
    with engine(models.target, head, **options) as llm:
        assert runner(llm)._caps == Shape(2, 2, 7)
        assert generate(llm, COUNTED, max_tokens=TEXT) == models.expected(COUNTED)
        assert 1.3 < accept_length(llm) <= 3


# ---------------------------------------------------------------------------------------------------------------------
# Sampling parameters

REQUESTS = 800
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {87: 0.8}},
]
LEAST_P = 1e-4 / (6 * 2)  # six views of two settings: a right verifier fails one of these tests once in 10,000 runs
PENALISED = {"frequency_penalty": 0.5}
PATTERN = {"structured_outputs": StructuredOutputsParams(regex=r"[ -~]{24}"), "ignore_eos": False, "detokenize": True}


class Plain(NamedTuple):
    """What plain decoding of the bigram target says."""

    drawn: list[Any]  # under SETTINGS; without the matrix under the first one only
    penalised: list[list[int]]
    matching: list[tuple[Any, ...]]


def constrained() -> dict[str, Any]:
    backend = {"backend": "xgrammar", "disable_any_whitespace": True}
    return OPTIONS | {"structured_outputs_config": backend}


@pytest.fixture(scope="module")
def plain(checkpoints: Path, request: pytest.FixtureRequest) -> Plain:
    target, _ = write_peagle(checkpoints)
    settings = SETTINGS[:1] if "not matrix" in request.config.option.markexpr else SETTINGS
    with engine(target, **constrained()) as llm:
        return Plain(
            draw(llm, settings, 2 * REQUESTS),
            tokens(ask(llm, PROMPTS, [PENALISED] * len(PROMPTS))),
            endings(ask(llm, PROMPTS, [PATTERN] * len(PROMPTS), max_tokens=60)),
        )


@pytest.fixture(scope="module")
def plugin(checkpoints: Path, plain: Plain) -> Iterator[LLM]:
    target, head = write_peagle(checkpoints)
    with engine(target, head, depth=4, topk=2, nodes=10, policy="random", **constrained()) as llm:
        yield llm


def test_sampled_text_has_the_distribution_of_plain_decoding(plugin: LLM, plain: Plain) -> None:
    acceptance = Acceptance(plugin)
    settings = SETTINGS[: len(plain.drawn)]
    for setting, ours, theirs in zip(settings, draw(plugin, settings, REQUESTS), plain.drawn, strict=True):
        found = p_values(ours, theirs)
        assert min(found.values()) > LEAST_P, (setting, found)
    assert acceptance.length > 1.2


def test_a_broken_verifier_is_found_out(plugin: LLM, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "verify_tree", broken_verifier.FAULTS["every draft accepted"])
    found = p_values(draw(plugin, SETTINGS[:1], REQUESTS)[0], plain.drawn[0])
    assert min(found.values()) < LEAST_P**2, found


def test_a_seed_fixes_the_text_whatever_is_drafted(plugin: LLM) -> None:
    settings = [{"temperature": 1.0, "seed": seed} for seed in (0, -7, 2**63 - 1)]
    alone = [tokens(ask(plugin, [PROMPT], [setting]))[0] for setting in settings]
    assert len({tuple(text) for text in alone}) == len(settings)
    others = [{"temperature": 1.0}] * len(settings)
    assert tokens(ask(plugin, [PROMPT] * 6, settings + others))[: len(settings)] == alone
    with fixed_shapes(plugin):
        assert tokens(ask(plugin, [PROMPT] * 3, settings)) == alone


def test_penalised_greedy_text_is_that_of_plain_decoding(plugin: LLM, plain: Plain) -> None:
    acceptance = Acceptance(plugin)
    assert tokens(ask(plugin, PROMPTS, [PENALISED] * len(PROMPTS))) == plain.penalised
    assert acceptance.length > 1.2


def test_text_under_a_grammar_is_that_of_plain_decoding(plugin: LLM, plain: Plain) -> None:
    """Its drafts are chains."""
    acceptance = Acceptance(plugin)
    assert endings(ask(plugin, PROMPTS, [PATTERN] * len(PROMPTS), max_tokens=60)) == plain.matching
    assert acceptance.length > 1.2
