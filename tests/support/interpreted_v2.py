"""Engines with draft trees in vLLM's V2 model runner, whose kernels run in Triton's interpreter.

test_v2_runner.py runs these tests, in a process that has Triton and its interpreter. The reference is plain decoding,
by the V1 runner: of V2 the interpreter takes seconds for a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from bigram_models import VOCAB
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup, warmup_kernels
from vllm_engines import (
    Rounds,
    accept_length,
    chosen_by,
    core,
    counters,
    drafted_shapes,
    engine,
    generate,
    random_shapes,
    requests_of,
    rounds,
    runner,
)
from vllm_greedy import Reference, make_prompts, write_heads, write_target

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.vllm.accepted_tokens import CacheGroup
from eagle_plugin.vllm.batch import RoundBatch
from eagle_plugin.vllm.v2_runner import V2TreeModelRunner

MATRIX = pytest.mark.matrix
PROMPTS = [prompt for prompt in make_prompts(12) if len(prompt) > 1][:5]
LENGTH = 20  # tokens of an answer
MOST = 4  # tokens that a tree can yield
SHAPE = (3, 4, 16)
TREES: dict[str, Any] = dict(zip(("depth", "topk", "nodes"), SHAPE, strict=True))
ASYNC: dict[str, Any] = {"plugin": {"async_scheduling": True}}


SETTINGS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 0.9},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.3},
    {"presence_penalty": -0.4, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
    {"logit_bias": {token: 2.0 * (-1) ** token for token in range(3, 60)}},
    {"allowed_token_ids": list(range(0, VOCAB, 2))},
    {"min_tokens": 12, "ignore_eos": False},
    {"stop_token_ids": list(range(1, VOCAB, 9))},
]
LOGPROBS: list[dict[str, Any]] = [{"logprobs": 3}, {}, {"logprobs": 0, "presence_penalty": 0.5}, {"logprobs": 5}]
DRAWN: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 12, "seed": -7},
    {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": 0.5, "seed": 2**63 - 1},
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 0, "logprobs": 2},
]


class Models(NamedTuple):
    target: Path
    heads: dict[str, Path]
    answers: list[list[int]]  # LENGTH + MOST tokens of plain decoding to each of PROMPTS
    plain: dict[str, list[Any]]  # what plain decoding says under SETTINGS and LOGPROBS, and with bad words
    drawn: list[list[int]]  # what trees in the V1 runner say under DRAWN

    @property
    def expected(self) -> list[list[int]]:
        return [answer[:LENGTH] for answer in self.answers]


def ask(llm: LLM, settings: list[dict[str, Any]]) -> list[Any]:
    """The first choice of each answer, one prompt after another; settings are those of ``SamplingParams``."""
    common = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, "detokenize": False}
    prompts = [TokensPrompt(prompt_token_ids=PROMPTS[i % len(PROMPTS)]) for i in range(len(settings))]
    asked = [SamplingParams(**common | setting) for setting in settings]
    return [answer.outputs[0] for answer in llm.generate(prompts, asked, use_tqdm=False)]


def ask_without(llm: LLM, bad_words: list[list[int]]) -> list[int]:
    """The answer to the first prompt without these words of several tokens."""
    setting = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    setting._bad_words_token_ids = bad_words
    prompt = TokensPrompt(prompt_token_ids=PROMPTS[0])
    return list(llm.generate([prompt], setting, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("greedy")
    target = write_target(folder)
    heads = write_heads(folder, target)
    with engine(target) as llm:
        answers = generate(llm, PROMPTS, max_tokens=LENGTH + MOST)
        plain = {
            "settings": ask(llm, SETTINGS),
            "logprobs": ask(llm, LOGPROBS),
            "bad words": ask_without(llm, [answers[0][5:7]]),
        }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE_VLLM_RUNNER", "v1")
        with engine(target, heads["reduced"], **TREES, policy="random") as llm:
            assert not isinstance(runner(llm), V2TreeModelRunner)
            drawn = [list(one.token_ids) for one in ask(llm, DRAWN)]
    return Models(target, heads, answers, plain, drawn)


@pytest.fixture(scope="module")
def trees(models: Models) -> Iterator[LLM]:
    """Steps scheduled ahead, as is vLLM's default on a GPU; the caps in every round."""
    with engine(models.target, models.heads["reduced"], **TREES, **ASYNC) as llm:
        assert isinstance(runner(llm), V2TreeModelRunner)
        yield llm


def test_the_engines_warm_up(models: Models, trees: LLM) -> None:
    """On a GPU vLLM runs steps of its own making before it serves, whose drafts are no trees."""
    made, sampled = runner(trees), []

    def sample(grammar: Any) -> Any:
        sampled.append(made.sample_tokens(grammar))
        return sampled[-1]

    warmup_kernels(made, made.execute_model, sample)
    assert run_mixed_prefill_decode_warmup(made, made.execute_model, sample, 64)
    assert len(sampled) > 4
    made.choose_by_costs()  # as the worker does after it
    assert not sum(totals.rounds for totals in made._shapes.chooser.totals.values())
    assert generate(trees, PROMPTS, max_tokens=LENGTH) == models.expected


def test_greedy_text_and_rounds(models: Models, trees: LLM) -> None:
    """What is drafted is right too: a tree that is drafted wrong is accepted less, or by chance more."""
    head, before = models.heads["reduced"], rounds(trees)
    assert generate(trees, PROMPTS, max_tokens=LENGTH) == models.expected
    wanted: Rounds = Reference(models.target, [head]).rounds(head, PROMPTS, models.answers, LENGTH, *SHAPE)
    assert rounds(trees, before) == wanted and wanted.tokens > 1.8 * wanted.count


@MATRIX  # of captured steps they change too
def test_greedy_text_whatever_the_shapes(models: Models, trees: LLM) -> None:
    with random_shapes(trees) as counts:
        assert generate(trees, PROMPTS, max_tokens=LENGTH) == models.expected
    assert len(counts) > 6


def test_parameters(models: Models, trees: LLM) -> None:
    """What changes the logits does so at every node, as plain decoding does it at every token."""
    expected = [list(one.token_ids) for one in models.plain["settings"]]
    assert sum(text != models.expected[i % len(PROMPTS)] for i, text in enumerate(expected)) > 5
    before = rounds(trees)
    assert [list(one.token_ids) for one in ask(trees, SETTINGS)] == expected
    spent = rounds(trees, before)
    assert spent.tokens > 1.3 * spent.count


@MATRIX
def test_bad_words_are_served_token_by_token(models: Models, trees: LLM) -> None:
    expected = models.plain["bad words"]
    assert expected != models.expected[0]
    assert ask_without(trees, [models.expected[0][5:7]]) == expected


def test_log_probabilities(models: Models, trees: LLM) -> None:
    for mine, theirs in zip(ask(trees, LOGPROBS), models.plain["logprobs"], strict=True):
        assert mine.token_ids == theirs.token_ids and (mine.logprobs is None) == (theirs.logprobs is None)
        for place, wanted in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
            assert place.keys() == wanted.keys()
            for token, value in place.items():
                assert value.logprob == pytest.approx(wanted[token].logprob, abs=2e-4)
                assert value.rank == wanted[token].rank


def test_a_seed_says_the_same_in_both_runners(models: Models, trees: LLM) -> None:
    """Whatever the shapes."""
    assert len({tuple(text) for text in models.drawn[:3]}) == 3
    assert [list(one.token_ids) for one in ask(trees, DRAWN)] == models.drawn
    with random_shapes(trees):
        assert [list(one.token_ids) for one in ask(trees, DRAWN)] == models.drawn


class TestControls:
    """What the tests above must notice."""

    def differing(self, models: Models, trees: LLM) -> int:
        """How many of the responses differ."""
        found = generate(trees, PROMPTS, max_tokens=LENGTH)
        return sum(a != b for a, b in zip(found, models.expected, strict=True))

    @MATRIX
    def test_keys_left_where_they_were(self, models: Models, trees: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CacheGroup, "move_accepted", lambda *_: None)
        assert self.differing(models, trees) > 2

    def test_positions_of_a_chain(self, models: Models, trees: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        put = RoundBatch.put_trees
        monkeypatch.setattr(RoundBatch, "put_trees", lambda batch, ids, positions: put(batch, ids, positions.clone()))
        assert self.differing(models, trees) > 2


def test_the_scheduler_is_ahead(trees: LLM) -> None:
    """Else nothing above is about vLLM's default."""
    assert core(trees).scheduler.__class__.__name__ == "AsyncScheduler"


def test_drafts_come_back_after_plain_steps(models: Models, trees: LLM) -> None:
    """In a step that was scheduled with none vLLM asks for none; the scheduler hears of the next wish all the same."""
    chooser, plain = ShapeChooser(runner(trees)._caps, None), iter([PLAIN] * 3)
    choose = chooser.choose
    chooser.choose = lambda *given: next(plain, None) or choose(*given)  # type: ignore[method-assign]
    with chosen_by(trees, chooser), drafted_shapes(trees) as counts:
        assert generate(trees, PROMPTS[:2], max_tokens=LENGTH) == models.expected[:2]
    assert counts[PLAIN] and counts[Shape(*SHAPE)] > 2


# Engines of their own, which end the process group of `trees` with them.


@pytest.mark.parametrize(
    ("head", "options"),
    [
        pytest.param("reduced", {"policy": "random", "max_num_batched_tokens": 40}, id="chunks and cut trees"),
        pytest.param("reduced", {"policy": "random", "num_gpu_blocks_override": 16} | ASYNC, id="preemption"),
        pytest.param("reduced", {"enable_prefix_caching": True} | ASYNC, id="prefix caching"),
        pytest.param("eagle2", {"policy": "random"}, id="EAGLE-2"),
        pytest.param("peagle", {"policy": "random"} | ASYNC, id="P-EAGLE"),
        pytest.param("peagle", {}, id="P-EAGLE, synchronous"),
        pytest.param("full", {"policy": "auto"} | ASYNC, id="costs"),
    ],
)
@MATRIX
def test_greedy_text_of(models: Models, head: str, options: dict[str, Any]) -> None:
    with engine(models.target, models.heads[head], **TREES | options) as llm:
        for _ in range(2):
            assert generate(llm, PROMPTS, max_tokens=LENGTH) == models.expected
        assert accept_length(llm) > 1.2
        if "num_gpu_blocks_override" in options:
            assert counters(llm)["vllm:num_preemptions"] > 0
        assert not runner(llm)._store._found.keys() - requests_of(llm)


@pytest.mark.parametrize("policy", [pytest.param("fixed", marks=MATRIX), "random", pytest.param("auto", marks=MATRIX)])
def test_captured_steps(models: Models, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs, emulated: the target over trees, the walk, the head and the drafting are replayed."""
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    with engine(models.target, models.heads["reduced"], **TREES, **ASYNC, policy=policy, max_num_seqs=4) as llm:
        assert generate(llm, PROMPTS, max_tokens=LENGTH) == models.expected
        assert runner(llm)._step.functions.replays > 20
