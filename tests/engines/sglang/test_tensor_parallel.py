"""Two ranks on a CPU (gloo) say what one rank says, whatever happens to one of them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import rank_faults
from sampling_requests import PROMPT, SETTINGS, SHAPE
from serving import GRAPHS, OVERLAP, accept_length, responses, serving, tiny_spec
from tiny_models import read_markov_map

from eagle_plugin.bench.servers import Server

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

PROMPTS = ["tree root leaf", "the quick brown fox", "a", "one two three", "x = y", "hello"]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 12},
]
PENALISED = {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": 0.5}
LENGTH = 32
STUCK_S = 60  # ranks that wait for each other never answer; an answer takes a second
# The ranks of this machine share its cores. Stock SGLang wants to be told so where it has one NUMA node.
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
TP_2 = ("--tp-size", "2")


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder from which the server with two ranks reads its faults."""
    return tmp_path_factory.mktemp("rank-faults") / "plugin"


@pytest.fixture(scope="module")
def servers(
    switch: Path, tmp_path_factory: pytest.TempPathFactory, bigram_target: Path, bigram_eagle3: Path
) -> Iterator[list[Server]]:
    """One rank, and two, which work as on a GPU: overlapped and with (emulated) graphs."""
    environment = rank_faults.install(switch) | TWO_RANKS | GRAPHS
    flags = (*SETTINGS["extra_flags"], *TP_2, "--enable-metrics")
    settings = SETTINGS | {"extra_flags": flags, "environment": environment, "name": "two-ranks"}
    settings["max_running_requests"] = 12  # graphs for up to 8
    specs = [tiny_spec(bigram_target, bigram_eagle3, SHAPE, **SETTINGS)]
    specs.append(tiny_spec(bigram_target, bigram_eagle3, SHAPE, **settings))
    with serving(specs, tmp_path_factory.mktemp("tensor-parallel")) as running:
        yield running


def say(
    server: Server, prompts: Sequence[str], sampling: Sequence[dict[str, Any]], length: int = LENGTH
) -> list[dict[str, Any]]:
    """The answers to prompts that are served in one batch, in their order; raises TimeoutException if none comes."""
    each = [{"max_new_tokens": length, "ignore_eos": True} | one for one in sampling]
    body = {"text": list(prompts), "sampling_params": each}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=STUCK_S, trust_env=False)
    answer.raise_for_status()
    return answer.json()


def say_greedily(server: Server) -> list[dict[str, Any]]:
    return say(server, PROMPTS, [{"temperature": 0}] * len(PROMPTS), 2 * LENGTH)


def say_by_seed(server: Server) -> list[dict[str, Any]]:
    """In two batches: penalties keep the walk of the whole batch out of graphs."""
    answers = []
    for settings in (SAMPLING, [PENALISED]):
        sampling = [one | {"sampling_seed": seed} for one in settings for seed in range(4)]
        answers += say(server, [PROMPT] * len(sampling), sampling)
    return answers


@pytest.fixture(scope="module")
def expected(servers: list[Server]) -> tuple[list[str], list[str]]:
    """What one rank says greedily, and by seeds."""
    spoken = responses(say_greedily(servers[0])), responses(say_by_seed(servers[0]))
    assert len(set(spoken[0])) == len(spoken[0]) and len(set(spoken[1])) == len(spoken[1])
    return spoken


@pytest.fixture
def no_splits(switch: Path, servers: list[Server]) -> Iterator[None]:
    """Rank 1 walks the paths of rank 0 by itself: trees, keys and logits are equal, not only what is broadcast."""
    yield
    assert rank_faults.splits(switch) == 0, "rank 1 walked other paths and was corrected"


@pytest.mark.usefixtures("no_splits")
def test_greedy_text_of_two_ranks(servers: list[Server], expected: tuple[list[str], list[str]]) -> None:
    answers = say_greedily(servers[1])
    assert responses(answers) == expected[0]
    assert accept_length(answers) > 1.4, "hardly a draft was accepted: the test says little about trees"


@pytest.mark.usefixtures("no_splits")
def test_sampled_text_of_two_ranks_by_seed(servers: list[Server], expected: tuple[list[str], list[str]]) -> None:
    answers = say_by_seed(servers[1])
    assert responses(answers) == expected[1]
    assert accept_length(answers) > 1.2


@pytest.mark.usefixtures("no_splits")
def test_requests_without_seeds_are_answered(servers: list[Server]) -> None:
    """Their keys are random, and equal in both ranks."""
    spoken = [responses(say(servers[1], [PROMPT] * 6, [*SAMPLING, PENALISED] * 2)) for _ in range(2)]
    assert len({text for batch in spoken for text in batch}) == 12


@pytest.mark.usefixtures("no_splits")
def test_a_grammar_is_kept_by_both_ranks(servers: list[Server]) -> None:
    shared = {"temperature": 1.0, "regex": "(ab|cd){4}", "ignore_eos": False}
    sampling = [shared | {"sampling_seed": seed} for seed in (1, 2)]
    spoken = [responses(say(server, [PROMPT] * 2, sampling)) for server in servers]
    assert spoken[0] == spoken[1]
    assert all(re.fullmatch("(ab|cd){4}", text) for text in spoken[1])


def test_requests_after_aborted_streams_are_answered(
    servers: list[Server], expected: tuple[list[str], list[str]]
) -> None:
    """Hang up in the middle of streams while others are served, then ask again."""

    def hang_up(chunks: int) -> None:
        parameters = {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True}
        body = {"text": f"{PROMPT} {chunks}", "sampling_params": parameters, "stream": True}
        with httpx.stream("POST", f"{servers[1].url}/generate", json=body, timeout=STUCK_S, trust_env=False) as stream:
            lines = stream.iter_lines()
            for _ in range(chunks):
                next(lines)

    with ThreadPoolExecutor(4) as pool:
        aborted = [pool.submit(hang_up, chunks) for chunks in (1, 3, 7, 12)]
        assert responses(say_by_seed(servers[1])) == expected[1]
        for one in aborted:
            one.result()
    assert responses(say_greedily(servers[1])) == expected[0]


def test_one_slow_rank_changes_no_text(
    servers: list[Server], switch: Path, expected: tuple[list[str], list[str]]
) -> None:
    rank_faults.choose(switch, "slow")
    began = time.monotonic()
    try:
        answers = say_greedily(servers[1])
        assert responses(answers) == expected[0]
        rounds = max(answer["meta_info"]["spec_verify_ct"] for answer in answers)
        assert time.monotonic() - began > rounds * rank_faults.SLOW_S, "no rank was slow"
        assert responses(say_by_seed(servers[1])) == expected[1]
    finally:
        rank_faults.choose(switch, "none")


def test_only_the_first_rank_logs_and_counts(servers: list[Server]) -> None:
    log = servers[1].log_text()
    assert log.count("is served by the plugin's draft trees") == 1
    assert log.count("emulated graphs for batches of up to 8 requests") == 1
    metrics = httpx.get(f"{servers[1].url}/metrics", timeout=STUCK_S, trust_env=False).text
    ours = [line for line in metrics.splitlines() if line.startswith("eagle_plugin:")]
    assert ours and all('tp_rank="0"' in line for line in ours)


@pytest.mark.matrix  # tests/engines/test_shared_times.py has two ranks without an engine
def test_ranks_that_learn_times_choose_alike(bigram_target: Path, bigram_eagle3: Path, tmp_path: Path) -> None:
    """Ranks with shapes of their own would wait for each other for ever."""
    environment = TWO_RANKS | OVERLAP | {"EAGLE_POLICY": "auto"}
    settings = SETTINGS | {"extra_flags": (*SETTINGS["extra_flags"], *TP_2, "--enable-metrics")}
    spec = tiny_spec(bigram_target, bigram_eagle3, SHAPE, **settings | {"environment": environment})
    with serving([spec], tmp_path) as (server,):
        for _ in range(3):
            say(server, PROMPTS, [{"temperature": 0}] * len(PROMPTS), 8 * LENGTH)
        metrics = httpx.get(f"{server.url}/metrics", timeout=STUCK_S, trust_env=False).text
    timed = [line for line in metrics.splitlines() if line.startswith("eagle_plugin:timed_steps_total")]
    assert sum(float(line.rsplit(maxsplit=1)[1]) for line in timed) > 50


@pytest.mark.matrix
@pytest.mark.parametrize(
    "ranks, dtype, algorithm, shape",
    [
        (2, "bfloat16", "EAGLE3", (4, 2, 8)),  # with int8 copies of every rank's own part of the head
        (4, "float32", "EAGLE", (5, 1, 6)),  # more ranks than heads of keys; lm_head and embedding of the target
    ],
)
def test_a_divided_perfect_head_reaches_the_greatest_accept_length(
    ranks: int,
    dtype: str,
    algorithm: str,
    shape: tuple[int, int, int],
    markov_target: Path,
    markov_eagle3_reduced: Path,
    markov_eagle2: Path,
    tmp_path: Path,
) -> None:
    """The target says one cycle of tokens, and the head knows it: a part of a weight that is wrong would show."""
    head = markov_eagle3_reduced if algorithm == "EAGLE3" else markov_eagle2
    flags = ("--skip-server-warmup", "--tp-size", str(ranks))
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * ranks)}
    spec = tiny_spec(
        markov_target, head, shape, algorithm=algorithm, dtype=dtype, extra_flags=flags, environment=environment
    )
    successor, longest = read_markov_map(markov_target), shape[0] + 1
    with serving([spec], tmp_path) as (server,):
        (answer,) = say(server, ["root"], [{"temperature": 0}], 1 + 6 * longest)
    ids = answer["output_ids"]
    assert ids[1:] == [int(successor[token]) for token in ids[:-1]]
    assert accept_length([answer]) == longest


def test_ranks_that_walk_differently_follow_the_first(
    servers: list[Server], switch: Path, expected: tuple[list[str], list[str]]
) -> None:
    """Rank 1 walks with other random numbers; its keys and values are those of rank 0's path nevertheless.

    The control comes last, because it breaks the server: without the broadcast the ranks split.
    """
    rank_faults.choose(switch, "skewed")
    assert responses(say_by_seed(servers[1])) == expected[1]
    assert rank_faults.splits(switch) > 5, "rank 1 did not walk differently"
    assert responses(say_greedily(servers[1])) == expected[0]
    rank_faults.choose(switch, "skewed alone")
    try:
        spoken = responses(say_by_seed(servers[1]))
    except httpx.HTTPError:  # the ranks wait for each other, or have ended
        return
    assert spoken != expected[1], "ranks on different paths gave the text of one path"
