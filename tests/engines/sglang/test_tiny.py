"""End to end on tiny fp32 targets: every tree shape and head kind gives the text of plain decoding."""

from __future__ import annotations

import json
import random

import httpx
import pytest
from cache_slots import check_aborted_requests
from penalised_greedy import greedy_ids
from scipy import stats
from serving import GRAPHS, OVERLAP, SYNCHRONOUS, generate, generate_all, responses, serving, tiny_spec
from tiny_checkpoints import EOS
from word_prompts import WORDS, make_prompts

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

CONTEXT, CACHE = 512, 4096  # tokens
SHAPES = [(3, 1, 4), (3, 4, 16), (6, 8, 64)]  # steps, children per node, nodes
# A random model would go on with spaces for ever.
FLAGS = ("--skip-server-warmup", "--constrained-json-disable-any-whitespace")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((SYNCHRONOUS, GRAPHS, OVERLAP), id="one of each"),
        pytest.param((SYNCHRONOUS,) * 3, id="synchronous", marks=pytest.mark.matrix),
        pytest.param((GRAPHS,) * 3, id="graphs", marks=pytest.mark.matrix),
    ],
)
def servers(request, tmp_path_factory, tiny_target, tiny_eagle3, tiny_eagle3_reduced, tiny_eagle2):
    """Plain decoding, and the plugin with SHAPES; one of them with chunks of 64 prompt tokens."""
    chain, tree, wide = SHAPES
    one, two, three = ({"environment": environment} for environment in request.param)
    flags = {"extra_flags": FLAGS, "context_length": CONTEXT, "max_total_tokens": CACHE}
    chunked = (*FLAGS, "--chunked-prefill-size", "64")
    specs = [
        tiny_spec(tiny_target, **flags),
        tiny_spec(tiny_target, tiny_eagle2, chain, algorithm="EAGLE", **flags, **one),
        tiny_spec(tiny_target, tiny_eagle3_reduced, tree, extra_flags=chunked, **two),
        tiny_spec(tiny_target, tiny_eagle3, wide, **flags, **three),
    ]
    with serving(specs, tmp_path_factory.mktemp("tiny")) as running:
        yield running


@pytest.fixture(scope="module")
def greedy_responses(servers) -> tuple[list[str], list[str]]:
    """Prompts, and their greedy text by plain decoding."""
    prompts = make_prompts(24)
    expected = responses(generate_all(servers[0], prompts, 64, at_once=8))
    assert len(set(expected)) > 18, "the target repeats itself: equality would prove little"
    return prompts, expected


def test_greedy_text_equals_plain_decoding_at_every_width(servers, greedy_responses):
    prompts, expected = greedy_responses
    for server in servers[1:]:
        assert responses(generate_all(server, prompts, 64, at_once=8)) == expected


@pytest.mark.parametrize(
    "which", [pytest.param(1, marks=pytest.mark.matrix), 2, pytest.param(3, marks=pytest.mark.matrix)]
)
def test_greedy_text_is_the_same_from_the_prefix_cache(servers, greedy_responses, which):
    prompts, expected = greedy_responses
    assert responses(generate_all(servers[which], prompts, 64, at_once=3)) == expected


def test_prompts_longer_than_the_prefill_chunk(servers):
    plain, _, chunked, _ = servers
    prompts = [" ".join(random.Random(i).choices(WORDS.split(), k=90)) for i in range(4)]
    answers = generate_all(chunked, prompts, 40, at_once=4)
    assert min(answer["meta_info"]["prompt_tokens"] for answer in answers) > 2 * 64
    assert responses(answers) == responses(generate_all(plain, prompts, 40, at_once=4))


def test_generation_up_to_the_context_length(servers):
    """The last trees reach beyond the context length: the engine itself keeps room for one tree, and reserves two."""
    plain, *trees = servers
    prompt = " ".join(random.Random(5).choices(WORDS.split(), k=125))
    length = generate(plain, prompt, 1)["meta_info"]["prompt_tokens"]
    expected = generate(plain, prompt, CONTEXT - length - 1)["output_ids"]
    assert len(set(expected[-16:])) > 2, "the text ends in a circle: equality would prove little"
    for server, (steps, topk, width) in zip(trees, SHAPES, strict=True):
        tokens = CONTEXT - length - max(steps * topk, width)
        answer = generate(server, prompt, tokens)
        assert answer["meta_info"]["completion_tokens"] == tokens
        assert answer["output_ids"] == expected[:tokens]
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            generate(server, prompt, tokens + 1)
        answer = generate(server, prompt, None)  # without a limit, as from a chat client: all that the engine allows
        assert answer["meta_info"]["completion_tokens"] > tokens and answer["output_ids"][: len(expected)] == expected
        assert responses([generate(server, "tree", 8)]) == responses([generate(plain, "tree", 8)])


@pytest.mark.matrix  # test_sampling.py and test_parallel_heads.py have it with a target that is worth penalising
def test_penalised_text_is_that_of_transformers(servers, tiny_target):
    """Greedy, under penalties that change the text.

    Against transformers and not against plain decoding, whose penalties the engine counts now and then a token off.
    """
    _, *trees = servers
    prompts = make_prompts(8)
    for frequency, presence, repetition in ((0.9, 0.0, 1.0), (0.0, 0.5, 1.4)):
        sampling = {"frequency_penalty": frequency, "presence_penalty": presence, "repetition_penalty": repetition}
        expected = [greedy_ids(tiny_target, prompt, 32, sampling) for prompt in prompts]
        assert expected != [greedy_ids(tiny_target, prompt, 32, {}) for prompt in prompts]
        for server in trees:
            answers = generate_all(server, prompts, 32, at_once=4, **sampling)
            assert [answer["output_ids"] for answer in answers] == expected, sampling


def test_biases_decode_as_without_speculation(servers):
    plain, *trees = servers
    prompts, sampling = make_prompts(8), {"logit_bias": {"70": 4.0, "75": -100.0}}
    expected = responses(generate_all(plain, prompts, 32, at_once=4, **sampling))
    assert expected != responses(generate_all(plain, prompts, 32, at_once=4))
    for server in trees:
        assert responses(generate_all(server, prompts, 32, at_once=4, **sampling)) == expected


def test_a_minimal_length_decodes_as_without_speculation(servers):
    """The end token is all but certain: without the minimal length every answer ends at once."""
    plain, *trees = servers
    prompts, sampling = make_prompts(8), {"ignore_eos": False, "logit_bias": {str(EOS): 100.0}}
    for server in servers:
        assert [answer["output_ids"] for answer in generate_all(server, prompts, 32, at_once=4, **sampling)] == [
            [EOS]
        ] * len(prompts)
    for minimum in (1, 6, 20):
        limited = sampling | {"min_new_tokens": minimum}
        expected = [answer["output_ids"] for answer in generate_all(plain, prompts, 32, at_once=4, **limited)]
        assert [ids.index(EOS) for ids in expected] == [minimum] * len(prompts)
        for server in trees:
            answers = generate_all(server, prompts, 32, at_once=4, **limited)
            assert [answer["output_ids"] for answer in answers] == expected, minimum


def test_stop_strings_and_token_limits_inside_an_accepted_run(servers):
    plain, *trees = servers
    prompts = make_prompts(6)
    whole = responses(generate_all(plain, prompts, 40, at_once=4))
    for limit in (1, 2, 3, 5, 8):
        expected = responses(generate_all(plain, prompts, limit, at_once=6))
        for server in trees:
            answers = generate_all(server, prompts, limit, at_once=6)
            assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [limit] * len(prompts)
            assert responses(answers) == expected
    for prompt, text in zip(prompts, whole, strict=True):
        stop = text[len(text) // 2 : len(text) // 2 + 2]
        expected = generate(plain, prompt, 40, stop=[stop])
        for server in trees:
            answer = generate(server, prompt, 40, stop=[stop])
            assert answer["text"] == expected["text"] and stop not in answer["text"]
            assert answer["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]


def test_streaming_sends_the_same_text(servers):
    plain, _, tree, _ = servers
    prompt = make_prompts(1)[0]
    body = {"model": "default", "prompt": prompt, "max_tokens": 40, "temperature": 0, "stream": True}
    pieces = []
    with httpx.stream("POST", f"{tree.url}/v1/completions", json=body, timeout=600, trust_env=False) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
    assert len(pieces) > 5
    assert "".join(pieces) == generate(plain, prompt, 40, ignore_eos=False)["text"]


def test_log_probabilities_equal_plain_decoding(servers):
    plain, *trees = servers
    body = {
        "text": make_prompts(3)[2],
        "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 3,
    }

    def rows(server):
        info = httpx.post(f"{server.url}/generate", json=body, timeout=600, trust_env=False).json()["meta_info"]
        return info["output_token_logprobs"], info["output_top_logprobs"]

    chosen, top = rows(plain)
    for server in trees:
        ours, our_top = rows(server)
        assert [row[1] for row in ours] == [row[1] for row in chosen]
        assert [row[0] for row in ours] == pytest.approx([row[0] for row in chosen], abs=2e-3)
        assert [[entry[1] for entry in row] for row in our_top] == [[entry[1] for entry in row] for row in top]


def test_a_json_schema_is_kept_at_every_node(servers):
    """The grammar masks every node with the state that the path to it leads to: every answer is valid and plain's."""
    plain, *trees = servers
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    closed = json.dumps(schema | {"additionalProperties": False})
    asked = {"json_schema": closed, "ignore_eos": False}
    expected = generate_all(plain, make_prompts(8), 60, at_once=4, **asked)
    for server in trees:
        answers = generate_all(server, make_prompts(8), 60, at_once=4, **asked)
        for answer in answers:
            assert answer["meta_info"]["finish_reason"]["type"] == "stop", answer["text"]
            assert json.loads(answer["text"]) in ({"a": True}, {"a": False})
        assert responses(answers) == responses(expected)
    free = generate_all(trees[-1], make_prompts(8), 60, at_once=4)
    assert not any(answer["text"].startswith("{") for answer in free), "the model writes objects by itself"


@pytest.mark.matrix  # test_sampling.py has it with more settings, on a target that is worth sampling from
def test_sampled_text_has_the_targets_distribution(servers):
    """Joint distribution of the second and third token, against plain decoding; false alarms about 1 in 10,000.

    The control: greedy text, which is what the engine's own worker answers on a CPU whatever the temperature.
    """
    plain, _, tree, wide = servers
    prompt, sampling = make_prompts(1)[0], {"temperature": 1.5, "top_k": 4}
    expected = _second_and_third(generate_all(plain, [prompt] * 500, 3, at_once=8, **sampling))
    for server in (tree, wide):
        drawn = _second_and_third(generate_all(server, [prompt] * 500, 3, at_once=8, **sampling))
        assert _p_value(expected, drawn) > 1e-4
    greedy = _second_and_third(generate_all(tree, [prompt] * 500, 3, at_once=8))
    assert _p_value(expected, greedy) < 1e-9


def _second_and_third(answers) -> list[tuple[int, ...]]:
    return [tuple(answer["output_ids"][1:3]) for answer in answers]


def _p_value(first, second) -> float:
    cells = sorted(set(first) | set(second))
    table = [[sample.count(cell) for cell in cells] for sample in (first, second)]
    rare = [i for i in range(len(cells)) if table[0][i] + table[1][i] < 10]  # pooled: the test is asymptotic
    kept = [[row[i] for i in range(len(cells)) if i not in rare] + [sum(row[i] for i in rare)] for row in table]
    columns = [column for column in zip(*kept, strict=True) if sum(column)]
    return stats.chi2_contingency(list(zip(*columns, strict=True)), lambda_="log-likelihood").pvalue


# The tree server is the one whose prompts come in chunks and whose rounds are one ahead, with captured functions.
@pytest.mark.parametrize(("which", "times"), [(2, 4), *(pytest.param(i, 20, marks=pytest.mark.matrix) for i in (2, 3))])
def test_no_cache_slot_leaks_over_many_requests_with_aborts(servers, which, times):
    plain, server = servers[0], servers[which]
    prompts = make_prompts(12)
    expected = responses(generate_all(plain, prompts, 12, at_once=8))
    check_aborted_requests(server, prompts, expected, 12, times)
    _fill_the_cache(server)
    server.check_alive()


def _fill_the_cache(server) -> None:
    """Eight requests that together need nearly the whole cache: lost slots would make them retract or starve."""
    prompts = [f"{WORDS} "[i:] + 3 * f"{WORDS} " for i in range(8)]
    answers = generate_all(server, prompts, 220, at_once=8)
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [220] * 8
    assert sum(answer["meta_info"]["prompt_tokens"] + 220 for answer in answers) > 0.75 * CACHE
