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
    "sglang requests synchronous": 240,
    "test_group[parameters]": 189,
    "test_group[sampling]": 162,
    "test_group[families]": 139,
    "test_group[ranks]": 138,
    "engines/sglang/test_parallel_heads.py": 135,
    "engines/sglang/test_tiny.py": 130,
    "test_group[graphs]": 127,
    "test_group[scheduling]": 118,
    "test_group[requests]": 114,
    "test_group[block drafters]": 100,
    "traffic/test_servers.py": 99,
    "reference/test_sampled.py": 93,
    "test_group[P-EAGLE]": 92,
    "test_group[multimodal]": 90,
    "engines/sglang/test_real.py": 85,
    "test_group[greedy]": 85,
    "deploy/test_package.py": 85,
    "test_group[linear layers]": 78,
    "test_group[adapter]": 78,
    "kernels/test_cuda_build.py": 78,
    "test_group[real model]": 76,
    "test_group[self-test]": 72,
    "engines/sglang/test_multimodal.py": 70,
    "kernels/test_triton_interpreter.py": 69,
    "engines/sglang/test_families.py": 67,
    "engines/sglang/test_broken_verifier.py": 65,
    "core/test_rule.py": 65,
    "engines/sglang/test_tensor_parallel.py": 63,
    "test_optimize.py": 60,
    "cuda emulation": 60,
    "collect/test_servers.py": 60,
    "kernels/test_triton_compile.py": 58,
    "test_group[heads]": 47,
    "policy/test_policy_changes.py": 46,
    "test_sglang_environment.py": 45,
    "engines/sglang/test_head_exchange.py": 45,
    "engines/sglang/test_selftest_start.py": 45,
    "bench/test_demo.py": 41,
    "test_group[caches]": 40,
    "engines/sglang/test_doctor.py": 40,
    "engines/sglang/test_lookup.py": 40,
    "bench/serving/test_command.py": 35,
    "test_wheel.py": 33,
    "test_group[V2 runner]": 32,
    "bench/test_vllm_server.py": 29,
    "train/test_resume.py": 28,
    "engines/test_engine_contract.py": 27,
    "engines/sglang/test_weight_updates.py": 27,
    "engines/sglang/test_lora.py": 26,
    "engines/sglang/test_host_waits.py": 24,
    "evaluate/test_measure.py": 23,
    "train/test_target_families.py": 22,
    "engines/sglang/test_stops.py": 22,
    "engines/sglang/test_quantised.py": 21,
    "train/test_distributed.py": 21,
    "heads/test_engine_classes.py": 21,
    "bench/test_compare_commits.py": 21,
    "data/test_prepare.py": 20,
    "engines/sglang/test_block_drafters.py": 20,
    "loop/test_traffic.py": 20,
    "train/test_online.py": 20,
    "engines/sglang/test_launches.py": 19,
    "train/test_loop.py": 18,
    "test_accidents.py": 17,
    "reference/test_decode.py": 17,
    "models/test_public.py": 15,
    "engines/sglang/test_fake_cuda.py": 15,
    "train/test_known_optimum.py": 15,
    "engines/sglang/test_many_levels.py": 14,
    "evaluate/test_check_command.py": 12,
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
