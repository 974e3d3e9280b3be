"""Block drafters (DFlash) with draft trees in SGLang: what they list is what a computation in plain torch lists, greedy
text is that of plain decoding, and sampled text has its distribution.

Stock SGLang starts no server with ``--speculative-algorithm DFLASH`` on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import block_lists
import host_waits
import httpx
import pytest
import torch
from cache_slots import check_aborted_requests
from dflash_reference import DFlashReference
from gtest import p_values
from penalised_greedy import PENALTIES, PROMPTS, ask_penalised, assert_penalised_greedy_text, greedy_ids
from sampling_distribution import load, prompt_ids, sample
from sampling_requests import PENALISED, PROMPT, SETTINGS, ask, draw
from serving import GRAPHS, OVERLAP, SYNCHRONOUS, accept_length, generate, generate_all, responses, serving, tiny_spec
from sglang_block_servers import BLOCK, DFLASH, FLAGS, SHAPE, Pair, Served, bigram_pair, served
from word_prompts import make_prompts

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

MATRIX = pytest.mark.matrix
LENGTH, REQUESTS = 40, 1000
LEAST_P = 1e-4 / (6 * 2)  # six views of two settings: a right verifier fails one of these tests once in 10,000 runs


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return bigram_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> Iterator[Served]:
    """Chunks of 16 prompt tokens; rounds of random shapes, plain ones among them, and a scheduler one round ahead."""
    yield from served(pair, tmp_path_factory.mktemp("server"), **OVERLAP)


def test_greedy_text_and_lists(one: Served, pair: Pair) -> None:
    """The second time from the prefix cache; then what was listed for one request alone."""
    prompts = [*PROMPTS, *(f"{prompt} " * 12 for prompt in PROMPTS[:2])]
    wanted = [greedy_ids(pair.target, prompt, LENGTH, {}) for prompt in prompts]
    for again in range(2):
        answers = ask(one.server, prompts, {"temperature": 0, "max_new_tokens": LENGTH})
        assert [answer["output_ids"] for answer in answers] == wanted, again
        assert accept_length(answers) > 1.3
    assert f"at most {SHAPE[0]} steps, {SHAPE[1]} children per node, {SHAPE[2]} nodes" in one.server.log_text()
    (one.folder / "lists").write_text("")
    text = prompt_ids(pair.target, prompts[-1]) + generate(one.server, prompts[-1], LENGTH)["output_ids"]
    found = block_lists.compared(one.folder, text, DFlashReference(*pair), BLOCK)
    assert len(found) > 5 and all(drafted.is_right for drafted in found)


def test_what_only_the_engines_rounds_do_is_refused(one: Served) -> None:
    body = {"text": PROMPT, "sampling_params": {"top_k": 1, "max_new_tokens": 4}, "return_sampling_mask": True}
    answer = httpx.post(f"{one.server.url}/generate", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 400 and "not served with the plugin's draft trees" in answer.text
    update = {"server_args": {"speculative_accept_threshold_acc": 0.5}}
    answer = httpx.post(f"{one.server.url}/set_internal_state", json=update, timeout=60, trust_env=False)
    assert "true" not in answer.text and "acc 0.5 is not served" in one.server.log_text()


@MATRIX
@pytest.mark.parametrize("setting", [{"temperature": 1.0}, PENALISED], ids=["sampled", "penalised"])
def test_sampled_text_has_the_targets_distribution(setting: dict, one: Served, pair: Pair) -> None:
    """And a verifier that accepts every draft is found out."""
    wanted = sample(pair.target, PROMPT, setting, 4 * REQUESTS, 4, seed=1).numpy()
    found = p_values(draw(one.server, [setting], REQUESTS)[0], wanted)
    assert min(found.values()) > LEAST_P, found
    block_lists.choose(one.folder, "every draft accepted")
    try:
        found = p_values(draw(one.server, [setting], REQUESTS)[0], wanted)
    finally:
        block_lists.choose(one.folder, "none")
    assert min(found.values()) < LEAST_P**2, found


@MATRIX
def test_a_json_schema_is_kept_at_every_node(one: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [True, 7, "x"]}}, "required": ["a"]}
    sampling = {"json_schema": json.dumps(schema | {"additionalProperties": False}), "ignore_eos": False}
    for temperature in (0.0, 1.0):
        for answer in ask(one.server, PROMPTS * 2, sampling | {"temperature": temperature, "max_new_tokens": 40}):
            assert json.loads(answer["text"]) in ({"a": True}, {"a": 7}, {"a": "x"}), answer["text"]


@MATRIX
def test_log_probabilities(one: Served, pair: Pair) -> None:
    """Those of the target, by transformers."""
    (answer,) = ask(one.server, [PROMPT], {"temperature": 0, "max_new_tokens": LENGTH}, return_logprob=True)
    found = [logp for logp, *_ in answer["meta_info"]["output_token_logprobs"]]
    text = [*prompt_ids(pair.target, PROMPT), *answer["output_ids"]]
    with torch.no_grad():
        rows = load(pair.target)(torch.tensor([text[:-1]])).logits[0].log_softmax(-1)[-LENGTH:]
    wanted = rows.gather(1, torch.tensor(answer["output_ids"])[:, None])[:, 0]
    assert torch.allclose(torch.tensor(found), wanted, atol=1e-3)


@MATRIX
def test_captured_rounds(tmp_path: Path, pair: Pair) -> None:
    """By the graph emulator. The server tests itself before it serves: a replay gives what the functions give."""
    settings = SETTINGS | {"extra_flags": FLAGS, "environment": GRAPHS}
    with serving([tiny_spec(pair.target, pair.head, SHAPE, **settings, **DFLASH)], tmp_path) as (server,):
        prompts = [*PROMPTS, *(f"{prompt} " * 12 for prompt in PROMPTS)]
        wanted = [greedy_ids(pair.target, prompt, LENGTH, {}) for prompt in prompts]
        for _ in range(2):
            answers = ask(server, prompts, {"temperature": 0, "max_new_tokens": LENGTH})
            assert [answer["output_ids"] for answer in answers] == wanted
            assert accept_length(answers) > 1.3
        for setting in ({"temperature": 1.0}, PENALISED):
            drawn = draw(server, [setting], REQUESTS)[0]
            found = p_values(drawn, sample(pair.target, PROMPT, setting, 4 * REQUESTS, 4, seed=1).numpy())
            assert min(found.values()) > LEAST_P, found
        alone = [ask(server, [PROMPT], asked(seed))[0]["text"] for seed in (0, 5)]
        assert [answer["text"] for answer in ask(server, [PROMPT] * 4, asked(5))] == [alone[1]] * 4 != [alone[0]] * 4


def asked(seed: int) -> dict:
    return {"temperature": 1.0, "max_new_tokens": LENGTH, "sampling_seed": seed}


@MATRIX
@pytest.mark.parametrize("way", ["ahead", "captured"])
def test_looked_up_branches_and_requests_without_drafts(way: str, tmp_path: Path, pair: Pair) -> None:
    """All in one batch: text stays, and only requests without drafts accept nothing."""
    environment = (GRAPHS if way == "captured" else OVERLAP) | {"EAGLE_LOOKUP": "on"}
    settings = SETTINGS | {"extra_flags": FLAGS, "environment": environment}
    fields = [{}, {"draft": False}, {"sources": ["head"]}, {"sources": ["lookup"]}]
    with serving([tiny_spec(pair.target, pair.head, SHAPE, **settings, **DFLASH)], tmp_path) as (server,):
        prompts = [f"{prompt} " * 8 for prompt in PROMPTS]
        wanted = [greedy_ids(pair.target, prompt, 2 * LENGTH, {}) for prompt in prompts]
        sampling = [
            {"temperature": 0, "max_new_tokens": 2 * LENGTH, "custom_params": {"eagle_plugin": fields[i % 4]}}
            for i in range(len(prompts))
        ]
        answers = ask(server, prompts, sampling)
        assert [answer["output_ids"] for answer in answers] == wanted
        for i in range(len(fields)):
            assert (accept_length(answers[i :: len(fields)]) > 1.05) == (fields[i] != {"draft": False})
        assert "branches are looked up" in server.log_text()


@MATRIX
def test_rounds_do_not_make_the_host_wait(tmp_path: Path, pair: Pair) -> None:
    """By the guard of test_host_waits.py, which has the control."""
    environment = host_waits.install(tmp_path / "waits") | OVERLAP
    spec = tiny_spec(pair.target, pair.head, SHAPE, **SETTINGS | {"environment": environment}, **DFLASH)
    with serving([spec], tmp_path) as (server,):
        for sampling in ({"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "sampling_seed": 3}, PENALISED):
            ask(server, PROMPTS, sampling | {"max_new_tokens": LENGTH})
        report = json.loads(Path(environment["EAGLE_TEST_WAITS"]).read_text())
    assert report["rounds"]["any"] >= 50 and report["findings"] == {}


@MATRIX
def test_retracted_requests_and_penalties(tmp_path: Path, pair: Pair) -> None:
    environment = OVERLAP | {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "16"}
    spec = tiny_spec(pair.target, pair.head, SHAPE, **SETTINGS | {"environment": environment}, **DFLASH)
    with serving([spec], tmp_path) as (server,):
        answers = ask_penalised(server, PENALTIES[0])
        assert_penalised_greedy_text(answers, pair.target, PENALTIES[0])
        assert any(answer["meta_info"]["num_retractions"] > 0 for answer in answers), "nothing was retracted"


CONTEXT = 512
SHAPES = [(7, 1, 8), (5, 8, 64), (1, 1, 2), (3, 4, 6)]  # a chain, many nodes, and two cut blocks


@MATRIX
@pytest.mark.parametrize("policy", ["fixed", "auto"])
def test_shapes_aborts_and_the_context_length(policy: str, tmp_path: Path, pair: Pair) -> None:
    """Whatever the shapes; no slot is lost; the last blocks reach beyond the context length."""
    flags = {"context_length": CONTEXT, "environment": SYNCHRONOUS | {"EAGLE_POLICY": policy}}
    shapes = SHAPES if policy == "fixed" else [SHAPE]
    specs = [
        tiny_spec(pair.target, **flags),
        *(tiny_spec(pair.target, pair.head, s, **flags, **DFLASH) for s in shapes),
    ]
    prompts = make_prompts(12)
    with serving(specs, tmp_path) as (plain, *trees):
        expected = responses(generate_all(plain, prompts, LENGTH, at_once=8))
        prompt = " ".join(prompts)[:200]
        length = generate(plain, prompt, 1)["meta_info"]["prompt_tokens"]
        whole = generate(plain, prompt, CONTEXT - length - 1)["output_ids"]
        for shape, server in zip(shapes, trees, strict=True):
            answers = generate_all(server, prompts, LENGTH, at_once=8)
            assert responses(answers) == expected and accept_length(answers) > 1.1
            tokens = CONTEXT - length - shape[2]
            assert generate(server, prompt, tokens)["output_ids"] == whole[:tokens]
            ids = generate(server, prompt, None)["output_ids"]  # all that the engine allows
            assert len(ids) >= tokens and ids == whole[: len(ids)]
            check_aborted_requests(server, prompts, expected, LENGTH, times=2)
