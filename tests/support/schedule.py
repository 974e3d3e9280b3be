"""How `make test` spreads the tests over its workers: what runs in one of them, and which groups start first.

A group is a file, or the files that share servers, or one process of the vLLM environment. pytest-xdist hands out the
groups in the order of the collected tests, so that the longest go first and short ones fill the gaps at the end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

VLLM_ENVIRONMENT = "test_vllm_environment.py"
# Files whose tests ask the same servers: those of "sglang bigram", in each of the ways in which its rounds run.
SHARED = {
    f"engines/sglang/test_{name}.py": "sglang bigram"
    for name in ("grammar", "logprobs", "metrics", "parameters", "sampling", "seeds")
}
WAYS = ("synchronous", "overlap", "graphs")  # parameters of the fixture `plugin`, so in the names of its tests
WAY = re.compile(rf"[\[-]({'|'.join(WAYS)})[\]-]")
# Seconds of the groups that take longest, on two cores: the lines "group" of `make test ARGS=--durations=20`.
# Only their order matters; a group that is not named comes after all of these.
SECONDS = {
    "sglang bigram graphs": 300,
    "sglang bigram synchronous": 250,
    "engines/sglang/test_broken_verifier.py": 100,
    "engines/sglang/test_tiny.py": 278,
    "engines/vllm/test_greedy_requests.py": 182,
    "test_group[sampling]": 143,
    "engines/sglang/test_tensor_parallel.py": 134,
    "engines/sglang/test_real.py": 132,
    "kernels/test_cuda_emulation.py": 128,
    "test_group[greedy]": 119,
    "engines/sglang/test_host_waits.py": 108,
    "test_group[requests]": 97,
    "test_optimize.py": 90,
    "engines/sglang/test_selftest_start.py": 87,
    "test_group[parameters]": 82,
    "test_group[scheduling]": 80,
    "test_group[real model]": 71,
    "engines/sglang/test_perfect_head.py": 71,
    "engines/sglang/test_refusals.py": 61,
    "kernels/test_cuda_build.py": 58,
    "core/test_rule.py": 53,
    "kernels/test_triton_compile.py": 50,
    "bench/test_vllm_server.py": 49,
    "bench/test_demo.py": 44,
    "test_group[heads]": 40,
    "evaluate/test_measure.py": 36,
    "reference/test_decode.py": 30,
    "engines/vllm/test_metrics.py": 29,
    "compat/test_native.py": 29,
    "kernels/test_triton_interpreter.py": 27,
    "train/test_target_families.py": 27,
    "test_wheel.py": 26,
    "reference/test_sampled.py": 25,
    "bench/test_compare_commits.py": 25,
    "engines/sglang/test_launches.py": 23,
    "heads/test_vllm_round_trip.py": 22,
    "train/test_resume.py": 20,
    "test_group[adapter]": 20,
    "train/test_distributed.py": 19,
    "kernels/test_loader.py": 19,
    "train/test_known_optimum.py": 18,
    "data/test_prepare.py": 18,
    "evaluate/test_check_command.py": 18,
    "heads/test_engine_classes.py": 15,
    "engines/sglang/test_ranks.py": 15,
    "bench/test_gpu_steps.py": 14,
    "heads/test_target_table.py": 14,
    "test_accidents.py": 13,
    "train/test_unroll.py": 12,
    "train/test_loop.py": 12,
    "data/generation/test_generation.py": 11,
    "kernels/test_native_required.py": 11,
}


def group_of(nodeid: str) -> str:
    """The group of a test, by its identifier "tests/FOLDER/FILE::NAME"."""
    path, _, name = nodeid.partition("::")
    file = path.removeprefix("tests/")
    if file == VLLM_ENVIRONMENT:
        return name
    way = WAY.search(name) if file in SHARED else None
    return f"{SHARED[file]} {way[1]}" if way else file


def longest_first(items: list[pytest.Item]) -> None:
    """Sort the groups of the collected tests without parting them."""
    groups = {item.nodeid: group_of(item.nodeid) for item in items}
    place = {group: number for number, group in enumerate(dict.fromkeys(groups.values()))}
    items.sort(key=lambda item: (-SECONDS.get(groups[item.nodeid], 0), place[groups[item.nodeid]]))


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The scheduler of pytest-xdist that keeps a group in one worker.

    Not its `--dist loadgroup`, whose version 3.8.0 does not see the groups of pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return GroupScheduling(config, log)


def seconds_by_group(reports: Iterable[pytest.TestReport]) -> list[tuple[str, float]]:
    """What the groups of a run took, set-up and tear-down included, the longest first."""
    total: Counter[str] = Counter()
    for report in reports:
        total[group_of(report.nodeid)] += report.duration
    return total.most_common()
