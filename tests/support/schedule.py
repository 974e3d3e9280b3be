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
# Files whose tests ask the same servers, which each of the ways has in which rounds run.
SHARED = {
    f"engines/sglang/test_{name}.py": group
    for group, names in {
        "sglang requests": ("by_request", "grammar", "logprobs", "metrics", "parameters", "sampling", "seeds"),
    }.items()
    for name in names
}
# Files whose tests ask the same build.
TOGETHER = {f"kernels/test_{name}.py": "cuda emulation" for name in ("cuda_emulation", "row_statistics")}
# Parameters of the fixture `plugin`, so in the names of its tests; sampling_requests.py.
WAYS = ("synchronous", "overlap", "graphs", "all levels at once")
WAY = re.compile(rf"[\[-]({'|'.join(WAYS)})[\]-]")
# Seconds of the groups that take longest, three at a time on two cores: the lines "group" of
# `make test ARGS=--durations=20`. Only their order matters; a group that is not named comes after all of these.
SECONDS = {
    "sglang requests synchronous": 124,
    "engines/sglang/test_tiny.py": 113,
    "test_group[graphs]": 107,
    "test_group[ranks]": 95,
    "test_group[adapter]": 91,
    "test_group[sampling]": 80,
    "test_group[parameters]": 79,
    "engines/sglang/test_parallel_heads.py": 71,
    "kernels/test_cuda_build.py": 66,
    "traffic/test_servers.py": 64,
    "kernels/test_triton_interpreter.py": 63,
    "engines/sglang/test_tensor_parallel.py": 52,
    "engines/sglang/test_mtp.py": 52,
    "test_group[requests]": 51,
    "deploy/test_package.py": 51,
    "engines/sglang/test_real.py": 50,
    "train/test_online.py": 50,
    "kernels/test_triton_compile.py": 49,
    "test_group[scheduling]": 47,
    "bench/test_demo.py": 46,
    "engines/sglang/test_multimodal.py": 43,
    "engines/sglang/test_families.py": 42,
    "test_sglang_environment.py": 38,
    "test_group[self-test]": 36,
    "cuda emulation": 36,
    "test_optimize.py": 31,
    "loop/test_traffic.py": 31,
    "test_group[greedy]": 31,
    "bench/serving/test_command.py": 31,
    "policy/test_policy_changes.py": 15,
    "policy/test_policy_times.py": 13,
    "collect/test_servers.py": 27,
    "engines/sglang/test_broken_verifier.py": 27,
    "test_group[P-EAGLE]": 26,
    "test_group[V2 runner]": 26,
    "test_group[multimodal]": 26,
    "test_group[real model]": 24,
    "test_wheel.py": 23,
    "engines/test_engine_contract.py": 22,
    "engines/sglang/test_weight_updates.py": 22,
    "engines/sglang/test_lora.py": 21,
    "bench/test_compare_commits.py": 21,
    "test_group[caches]": 20,
    "bench/test_vllm_server.py": 20,
    "engines/sglang/test_head_exchange.py": 20,
    "engines/sglang/test_host_waits.py": 20,
    "bench/test_servers.py": 19,
    "test_group[block drafters]": 18,
    "evaluate/test_measure.py": 18,
    "reference/test_sampled.py": 18,
    "test_group[families]": 18,
    "evaluate/test_check_command.py": 17,
    "engines/sglang/test_lookup.py": 17,
    "train/test_resume.py": 16,
    "train/test_loop.py": 15,
    "test_group[linear layers]": 14,
    "engines/sglang/test_stops.py": 14,
    "engines/sglang/test_launches.py": 14,
    "engines/sglang/test_quantised.py": 14,
    "data/test_prepare.py": 14,
    "engines/sglang/test_block_drafters.py": 14,
    "engines/sglang/test_markov_drafters.py": 13,
    "train/test_distributed.py": 13,
    "engines/sglang/test_doctor.py": 13,
    "bench/test_load.py": 13,
    "engines/sglang/test_many_levels.py": 12,
    "engines/sglang/test_perfect_head.py": 12,
    "core/test_rule.py": 12,
    "data/generation/test_generation.py": 12,
    "train/test_unroll.py": 11,
    "deploy/test_deploy_command.py": 11,
    "engines/sglang/test_selftest_start.py": 10,
    "train/test_known_optimum.py": 10,
}


def group_of(nodeid: str) -> str:
    """The group of a test, by its identifier "tests/FOLDER/FILE::NAME"."""
    path, _, name = nodeid.partition("::")
    file = path.removeprefix("tests/")
    if file == VLLM_ENVIRONMENT:
        return name
    way = WAY.search(name) if file in SHARED else None
    return f"{SHARED[file]} {way[1]}" if way else TOGETHER.get(file, file)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort the groups of the collected tests without parting them."""
    groups = {item.nodeid: group_of(item.nodeid) for item in items}
    place = {group: number for number, group in enumerate(dict.fromkeys(groups.values()))}
    items.sort(key=lambda item: (-SECONDS.get(groups[item.nodeid], 0), place[groups[item.nodeid]]))


def keep_part(items: list[pytest.Item], part: str) -> list[pytest.Item]:
    """Keep the groups of one part, "K/N", so that several machines or days share a run; returns what was left out."""
    number, parts = map(int, part.split("/"))
    assert 1 <= number <= parts, f"--part is {part}, wanted K/N with 1 <= K <= N"
    groups = dict.fromkeys(group_of(item.nodeid) for item in items)
    chosen = set(sorted(groups, key=lambda group: (-SECONDS.get(group, 0), group))[number - 1 :: parts])
    left = [item for item in items if group_of(item.nodeid) not in chosen]
    items[:] = [item for item in items if group_of(item.nodeid) in chosen]
    return left


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
