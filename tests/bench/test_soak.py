"""The stream of requests of benchmarks/soak.py, and the rules that its checks apply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.soak_checks import Check, Report, faults_of
from benchmarks.soak_requests import ask_of, at_once, probes
from benchmarks.soak_shrink import bounded, first_fault, shrunk
from eagle_plugin.bench.machine import describe_machine

GOOD = Check(
    requests=1000,
    seconds=10.0,
    answered={"200": 900, "left": 100},
    running=0.0,
    cache_in_use=0.0,
    memory_mib=1500.0,
    threads=50,
    files=150,
    accept_length=2.0,
    same_responses=True,
    drafted=100.0,
    accepted=50.0,
    verify_rounds=80.0,
    shape_rounds=90.0,
    faults=[],
)


def test_a_request_is_a_function_of_seed_and_number() -> None:
    stream = [ask_of("sglang", 1, number) for number in range(50)]
    assert stream == [ask_of("sglang", 1, number) for number in range(50)]
    assert stream != [ask_of("sglang", 2, number) for number in range(50)]
    assert probes() == probes() and {body["temperature"] for body in probes()} == {0}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_stream_has_all_that_an_api_takes(engine: str) -> None:
    stream = [ask_of(engine, 1, number) for number in range(2000)]
    keys = {key for ask in stream for key in ask.body}
    wanted = {
        "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "frequency_penalty",
        "presence_penalty", "repetition_penalty", "logit_bias", "ignore_eos", "stop", "stop_token_ids", "min_tokens",
        "logprobs", "stream", "eagle_plugin",
    }  # fmt: skip
    assert keys >= wanted | {"regex" if engine == "sglang" else "structured_outputs"}
    assert sum(ask.leaves_after is not None for ask in stream) > 100
    assert all(ask.body["stream"] for ask in stream if ask.leaves_after is not None)
    assert {at_once(ask.number) for ask in stream} >= {1, 48}
    prompts = [tuple(ask.body["prompt"][:5]) for ask in stream if len(ask.body["prompt"]) > 5]
    assert len(set(prompts)) < 0.7 * len(prompts)  # many begin alike


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"running": 1.0}, "1 requests run although every answer has come"),
        ({"cache_in_use": 2.0}, "2 of the cache are in use"),
        ({"same_responses": False}, "greedy texts of the probes differ"),
        ({"accepted": 101.0}, "101 tokens were accepted of 100"),
        ({"verify_rounds": 91.0}, "91 rounds verified trees of 90"),
        ({"answered": {"200": 999, "500": 1}}, "requests ended with {'500': 1}"),
        ({"threads": 51}, "51 threads are open, 50 were after the warm-up"),
        ({"files": 151}, "151 files are open"),
        ({"memory_mib": 1516.0}, "memory grew from 1500 to 1516 MiB"),
        ({"accept_length": 1.9}, "accept length is 1.9, 2.000 before"),
    ],
)
def test_every_rule_is_applied(changes: dict[str, Any], fault: str) -> None:
    assert faults_of(GOOD, []) == faults_of(GOOD, [GOOD, GOOD]) == []
    (found,) = faults_of(GOOD.model_copy(update=changes), [GOOD, GOOD])
    assert fault in found


def test_a_warm_up_may_grow() -> None:
    assert faults_of(GOOD, [GOOD.model_copy(update={"memory_mib": 1000.0, "threads": 10})]) == []


@pytest.mark.parametrize("needed", [{17}, {3, 88}, {0, 1, 99}, set(range(40, 60))])
def test_a_failing_list_is_cut_to_what_it_needs(needed: set[int]) -> None:
    tried: list[Sequence[int]] = []

    def fails(numbers: Sequence[int]) -> bool:
        tried.append(numbers)
        return needed <= set(numbers)

    assert shrunk(range(100), fails) == sorted(needed)
    assert len(tried) < 300 and all(list(one) == sorted(one) for one in tried)


def test_after_the_last_attempt_what_was_found_is_kept() -> None:
    left = shrunk(range(100), bounded(3, lambda numbers: 17 in numbers))
    assert 17 in left and len(left) < 100


def test_the_first_fault_that_few_requests_can_show() -> None:
    machine = describe_machine()
    faults: list[list[str]] = [
        [],
        ["memory grew from 1 to 2 MiB"],
        ["2 of the cache are in use although nothing runs"],
        [],
    ]
    checks = [GOOD.model_copy(update={"requests": 10 * i + 10, "faults": x}) for i, x in enumerate(faults)]
    report = Report(engine="vllm", seed=1, every=10, machine=machine, checks=checks)
    assert first_fault(report) == (20, 30, "2 of the cache are in use although nothing runs")
    assert first_fault(report.model_copy(update={"checks": checks[:2]})) is None
