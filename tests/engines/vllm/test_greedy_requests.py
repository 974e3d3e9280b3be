"""What can happen to a request in a batch of draft trees leaves greedy text that of plain decoding.

Every test runs with vLLM's scheduler of CPUs, where the shapes of the trees change at random from round to round, and
with its asynchronous one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import LLM, RequestOutput, SamplingParams
from vllm.inputs import TokensPrompt
from vllm_engines import accept_length, core, counters, engine, free_blocks, generate, run, runner, settle
from vllm_greedy import VOCAB, make_prompts, write_heads, write_target

MATRIX = pytest.mark.matrix
TREES: dict[str, Any] = {"depth": 3, "topk": 4, "nodes": 16}
CONTEXT = 256
BLOCK = 32
PROMPTS = make_prompts(16)


class Pair(NamedTuple):
    """A plain engine and one with trees; the latter was made last, so vLLM's metrics are its."""

    plain: LLM
    trees: LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("requests")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with engine(write_target(folder), max_model_len=CONTEXT, block_size=BLOCK) as llm:
        yield llm


@pytest.fixture(scope="module", params=[pytest.param(False, id="sync"), pytest.param(True, id="async", marks=MATRIX)])
def pair(folder: Path, plain: LLM, request: pytest.FixtureRequest) -> Iterator[Pair]:
    head = folder / "reduced"
    if not head.exists():
        write_heads(folder, folder / "target")
    options = {"max_model_len": CONTEXT, "block_size": BLOCK, "enable_prefix_caching": True}
    plugin = {"async_scheduling": request.param}
    with engine(folder / "target", head, policy="random", **TREES, plugin=plugin, **options) as llm:
        assert (type(core(llm).scheduler).__name__ == "AsyncScheduler") == request.param
        yield Pair(plain, llm)
        assert accept_length(llm) > 1.5


@pytest.fixture(scope="module")
def answers(plain: LLM) -> list[list[int]]:
    """48 tokens of plain decoding to each of PROMPTS."""
    return generate(plain, PROMPTS)


@pytest.fixture(autouse=True)
def nothing_is_kept(pair: Pair) -> Iterator[None]:
    """After each test no block, tree or request is left over."""
    before = free_blocks(pair.trees)
    yield
    settle(pair.trees)
    assert free_blocks(pair.trees) == before
    served = runner(pair.trees)
    assert not served.requests and not served._store._found
    assert not served._deferred.rows_of_requests  # what is left is of blocks that others may find


def endings(answers: Sequence[RequestOutput]) -> list[tuple[Any, ...]]:
    """What a user sees of every choice."""
    return [
        (list(choice.token_ids), choice.text, choice.finish_reason, choice.stop_reason)
        for answer in answers
        for choice in answer.outputs
    ]


def accepted(llm: LLM) -> float:
    """Drafted tokens that were accepted so far."""
    return counters(llm)["vllm:spec_decode_num_accepted_tokens"]


def test_prefix_hits(pair: Pair) -> None:
    """The same long prompts again, prompts that go on from them, and prompts whose blocks are all known."""
    dice = random.Random(3)
    long = [dice.choices(range(3, VOCAB), k=k) for k in (4 * BLOCK, 4 * BLOCK + 1, 130, 97)]
    batches = [long, long, [prompt + [5, 9, 11] for prompt in long], [prompt[: 3 * BLOCK] for prompt in long]]
    hits = []
    for prompts in batches:
        assert generate(pair.trees, prompts) == generate(pair.plain, prompts)
        hits.append(counters(pair.trees)["vllm:prefix_cache_hits"])
    assert hits[0] < hits[1] < hits[2] < hits[3]


def test_continued_answers(pair: Pair) -> None:
    """A prompt that holds an answer finds the keys of accepted drafts in the cache: they must be the right ones."""
    prompts = [prompt[-BLOCK // 2 :] for prompt in make_prompts(8, seed=5)]
    answers = generate(pair.trees, prompts, max_tokens=3 * BLOCK)
    before = counters(pair.trees)["vllm:prefix_cache_hits"]
    longer = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    assert generate(pair.trees, longer) == generate(pair.plain, longer)
    assert counters(pair.trees)["vllm:prefix_cache_hits"] - before >= 8 * 2 * BLOCK


@pytest.mark.parametrize("after", [pytest.param(1, marks=MATRIX), 4, pytest.param(9, marks=MATRIX)])
def test_aborts_leave_the_others_alone(pair: Pair, answers: list[list[int]], after: int) -> None:
    """Some of the requests go in the middle of a batch; new ones take their place."""
    served, found = pair.trees.llm_engine, {}
    settings = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(PROMPTS):
        served.add_request(f"{after}.{i}", TokensPrompt(prompt_token_ids=prompt), settings)
    wanted = {f"{after}.{i}": answer for i, answer in enumerate(answers)}
    gone = {f"{after}.{i}" for i in (0, 2, 3, 7, 9)}  # the last waits while the others are served; none has ended
    scheduler = core(pair.trees).scheduler
    steps = 0
    running: set[str] = set()  # at the time of the aborts
    while served.has_unfinished_requests():
        for answer in served.step():
            if answer.finished:
                found[answer.request_id] = list(answer.outputs[0].token_ids)
        steps += 1
        if steps == after:
            running = {request.request_id.rpartition("-")[0] for request in scheduler.running}
            served.abort_request(sorted(gone))
    assert gone & running and gone - running and running - gone and wanted.keys() - running - gone
    assert found == {name: answer for name, answer in wanted.items() if name not in gone}


def test_the_end_of_the_context(pair: Pair) -> None:
    """Answers go on to max_model_len, which lies inside the last trees."""
    dice = random.Random(11)
    prompts = [dice.choices(range(3, VOCAB), k=CONTEXT - room) for room in [1, 2, 3, 5, 9, 15, 16, 17, 18, 31, 40, 64]]
    found, expected = (endings(run(llm, prompts, max_tokens=CONTEXT)) for llm in (pair.trees, pair.plain))
    assert found == expected
    assert all(
        len(prompt) + len(tokens) == CONTEXT and reason == "length"
        for prompt, (tokens, _, reason, _) in zip(prompts, found, strict=True)
    )


def test_several_answers_to_a_prompt(pair: Pair, answers: list[list[int]]) -> None:
    """vLLM refuses n > 1 at temperature 0; with top_k 1 every answer is the greedy one."""
    found = run(pair.trees, PROMPTS, n=3, temperature=1.0, top_k=1)
    assert [[list(choice.token_ids) for choice in one.outputs] for one in found] == [[answer] * 3 for answer in answers]


def test_max_tokens_inside_a_tree(pair: Pair, answers: list[list[int]]) -> None:
    for n in (1, 2, 3, 6):
        assert generate(pair.trees, PROMPTS, max_tokens=n) == [answer[:n] for answer in answers]


def test_stop_tokens(pair: Pair, answers: list[list[int]]) -> None:
    """Tokens that answers say, so at any node of a tree; what is accepted after them must not come out."""
    stops = [answer[7 + i % 9] for i, answer in enumerate(answers)]
    for stop in sorted(set(stops))[:2]:
        found, expected = (endings(run(llm, PROMPTS, stop_token_ids=[stop])) for llm in (pair.trees, pair.plain))
        assert found == expected
        assert any(stop_reason == stop for *_, stop_reason in found)


def test_stop_strings(pair: Pair) -> None:
    """Strings over several tokens, which a tree may accept at once."""
    responses = [choice[1] for choice in endings(run(pair.plain, PROMPTS, detokenize=True))]
    stops = [text[8 + i % 5 :][:3] for i, text in enumerate(responses)]
    for include in (False, True):
        settings = {"stop": stops[:8], "detokenize": True, "include_stop_str_in_output": include}
        found, expected = (endings(run(llm, PROMPTS, **settings)) for llm in (pair.trees, pair.plain))
        assert found == expected
        assert sum(reason == "stop" for _, _, reason, _ in found) >= 8


def test_the_end_of_the_text(pair: Pair) -> None:
    ending = pair.plain.get_tokenizer().eos_token_id
    before = accepted(pair.trees)
    found, expected = (endings(run(llm, PROMPTS, ignore_eos=False)) for llm in (pair.trees, pair.plain))
    assert found == expected
    assert sum(reason == "stop" and tokens[-1] == ending for tokens, _, reason, _ in found) > 3
    assert accepted(pair.trees) > before
    held, wanted = (endings(run(llm, PROMPTS, ignore_eos=False, min_tokens=20)) for llm in (pair.trees, pair.plain))
    assert held == wanted != found


def test_many_mixed_requests(pair: Pair) -> None:
    """200 short requests of every kind, a tenth of them aborted; the fixture looks for what is left behind."""
    dice = random.Random(1)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "n": 2},
        {"logprobs": 3},
        {"min_tokens": 3, "ignore_eos": False},
        {"repetition_penalty": 1.3},
        {"stop_token_ids": list(range(3, VOCAB, 9))},
    ]
    served, waiting, names = pair.trees.llm_engine, 200, iter(range(200))
    answered = 0
    while waiting or served.has_unfinished_requests():
        for name in (next(names) for _ in range(min(waiting, dice.randint(0, 6)))):
            waiting -= 1
            settings: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
            settings |= {"max_tokens": dice.randint(3, 12)} | kinds[name % len(kinds)]
            prompt = dice.choices(range(3, VOCAB), k=dice.choice([1, 2, 9, 33, 70]))
            served.add_request(f"mixed.{name}", TokensPrompt(prompt_token_ids=prompt), SamplingParams(**settings))
            if name % 10 == 0:
                gone = f"mixed.{name - dice.randint(0, 9)}"
                served.abort_request([gone])
        answered += sum(answer.finished for answer in served.step())
    assert 180 <= answered <= 200
