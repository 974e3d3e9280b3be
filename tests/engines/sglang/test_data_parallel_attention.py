"""Two ranks of SGLang's data-parallel attention on a CPU: text of plain decoding with the same flags, and distribution.

The ranks run every forward of the target together, and have other requests: one of them is often without any.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import replica_faults
from family_draws import check_distribution, check_draws
from family_models import family_head, sampling_settings, sglang_target
from serving import GRAPHS, OVERLAP, SYNCHRONOUS, accept_length, responses, serving, tiny_spec
from word_prompts import make_prompts

from eagle_plugin.bench.servers import Server

pytest.importorskip("sglang")
pytestmark = [pytest.mark.server, pytest.mark.matrix]

SHAPE = (3, 8, 32)
FLAGS = ("--skip-server-warmup", *("--chunked-prefill-size", "64"), "--enable-custom-logit-processor")
TWO_RANKS = (*("--tp-size", "2"), *("--attn-dp-size", "2"))
SHARED = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}  # they share the cores; SGLang wants to be told
STUCK_S = 60  # ranks that wait for each other never answer; an answer takes a second
# By the family of the target and how rounds run: graphs of experts cannot be emulated.
CASES = {
    "dense": ("qwen3", SYNCHRONOUS),
    "dense, graphs": ("qwen3", GRAPHS),
    "experts alone": ("qwen3_moe", OVERLAP),
    "experts and windows": ("gpt_oss", OVERLAP),
}


class Servers(NamedTuple):
    """The plugin's with two ranks, and what is compared with it."""

    family: str
    plain: Server  # of one rank: two that have nothing to do keep both cores of a small machine busy
    plugin: Server
    is_captured: bool
    folder: Path  # where the plugin's faults are chosen
    expected: list[str]  # texts of the `uneven_requests` by plain decoding of two ranks


@contextlib.contextmanager
def start(folder: Path, family: str, environment: dict[str, str]) -> Iterator[Servers]:
    target = sglang_target(folder / "target", family)
    head = family_head(folder / "head", target)
    faults = replica_faults.install(folder / "plugins")
    flags = {"extra_flags": FLAGS + TWO_RANKS}
    with serving([tiny_spec(target, **flags, environment=SYNCHRONOUS | SHARED)], folder / "two") as (two,):
        expected = responses(answers_of(two, uneven_requests(), 4))
    specs = [tiny_spec(target, extra_flags=FLAGS)]
    specs.append(tiny_spec(target, head, SHAPE, **flags, environment=environment | SHARED | faults))
    with serving(specs, folder / "logs") as (plain, plugin):
        yield Servers(family, plain, plugin, environment == GRAPHS, folder / "plugins", expected)


@pytest.fixture(scope="module", params=list(CASES.values()), ids=list(CASES))
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with start(tmp_path_factory.mktemp("replicas"), *request.param) as started:
        yield started


def ask(
    server: Server, rank: int | None, prompt: str, tokens: int, seconds: float = STUCK_S, **fields: Any
) -> dict[str, Any]:
    """One greedy request to a rank, unless `sampling` says otherwise; raises TimeoutException if none is answered."""
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens} | fields.pop("sampling", {})
    body = {"text": prompt, "sampling_params": sampling, "routed_dp_rank": rank} | fields
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=seconds, trust_env=False)
    answer.raise_for_status()
    return answer.json()


Request = tuple[int, str, int]  # to which rank, prompt, tokens


def answers_of(server: Server, requests: Sequence[Request], at_once: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda request: ask(server, *request), requests))


def uneven_requests(count: int = 32) -> list[Request]:
    """Some for one rank alone, then more for one than for the other, of many lengths, some longer than a chunk."""
    dice, prompts = random.Random(5), make_prompts(count)
    prompts = [prompt * 4 if number % 7 == 0 else prompt for number, prompt in enumerate(prompts)]
    ranks = [number // 4 % 2 if number < 16 else int(dice.random() < 0.25) for number in range(count)]
    return [(rank, prompt, dice.randint(2, 64)) for rank, prompt in zip(ranks, prompts, strict=True)]


def test_greedy_text_equals_plain_decoding(servers: Servers) -> None:
    assert len({text for text in servers.expected if len(text) > 8}) > len(servers.expected) * 0.6
    for at_once in (2, 6):  # one rank without requests in most rounds, and in some
        answers = answers_of(servers.plugin, uneven_requests(), at_once)
        assert responses(answers) == servers.expected
        assert accept_length(answers) > 1.1


def test_a_rank_that_can_run_plain_rounds_only(servers: Servers) -> None:
    """Its custom logit processor counts on one token per round: then the other rank has plain rounds too."""
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    ids = ask(servers.plain, None, "tree", 24)["output_ids"]
    fields = {
        "custom_logit_processor": DisallowedTokensLogitsProcessor.to_str(),
        "sampling": {"custom_params": {"token_ids": sorted(set(ids))[::2]}},
    }
    expected = ask(servers.plain, None, "tree", 24, **fields)
    assert expected["output_ids"] != ids
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(answers_of, servers.plugin, uneven_requests(), 6)
        answers = [ask(servers.plugin, 0, "tree", 24, **fields) for _ in range(3)]
        assert responses(answers) == responses([expected]) * 3
        assert all(answer["meta_info"]["spec_verify_ct"] == 23 for answer in answers)
        assert responses(beside.result()) == servers.expected


def test_sampled_text_has_the_distribution_of_plain_decoding(servers: Servers) -> None:
    """The control: a verifier that takes every temperature for 1. What was captured keeps the right one."""
    settings = sampling_settings(servers.family)
    if servers.is_captured:
        check_draws(servers.plain, servers.plugin, settings)
    else:
        check_distribution(servers.plain, servers.plugin, servers.folder, settings)


def test_ranks_do_not_draw_alike(servers: Servers) -> None:
    sampling = {"sampling": {"temperature": 1.0}}
    answers = {ask(servers.plugin, rank, "tree root", 48, **sampling)["text"] for rank in (0, 1) for _ in range(4)}
    assert len(answers) == 8


def test_requests_after_aborted_streams_are_answered(servers: Servers) -> None:
    def hang_up(chunks: int) -> None:
        body = {"text": f"leave {chunks}", "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
        body |= {"stream": True, "routed_dp_rank": chunks % 2}
        url = f"{servers.plugin.url}/generate"
        with httpx.stream("POST", url, json=body, timeout=STUCK_S, trust_env=False) as stream:
            lines = stream.iter_lines()
            for _ in range(chunks):
                next(lines)

    with ThreadPoolExecutor(4) as pool:
        aborted = [pool.submit(hang_up, chunks) for chunks in (1, 2, 3, 6, 9, 14)]
        assert responses(answers_of(servers.plugin, uneven_requests(), 6)) == servers.expected
        for one in aborted:
            one.result()
    assert responses(answers_of(servers.plugin, uneven_requests(), 3)) == servers.expected


@pytest.mark.parametrize("fault", ["no idle rounds", "own shape"])
def test_ranks_that_do_not_run_the_same_rounds_are_seen(fault: str, tmp_path: Path) -> None:
    """The control: it breaks the server."""
    with start(tmp_path, "qwen3", OVERLAP) as servers:
        replica_faults.choose(servers.folder, fault)
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask, servers.plugin, *request, seconds=20) for request in uneven_requests()]
        failures = [one.exception() for one in asked]
        if any(isinstance(one, httpx.HTTPError) for one in failures):
            return  # the ranks wait for each other, or have ended
        assert responses([one.result() for one in asked]) != servers.expected
