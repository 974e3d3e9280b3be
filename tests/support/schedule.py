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
        "sglang requests": ("grammar", "logprobs", "metrics", "parameters"),
        "sglang draws": ("sampling", "seeds"),
    }.items()
    for name in names
}
# Parameters of the fixture `plugin`, so in the names of its tests; sampling_requests.py.
WAYS = ("synchronous", "overlap", "graphs", "all levels at once")
WAY = re.compile(rf"[\[-]({'|'.join(WAYS)})[\]-]")
# Seconds of the groups that take longest, three at a time on two cores: the lines "group" of
# `make test ARGS=--durations=20`. Only their order matters; a group that is not named comes after all of these.
SECONDS = {
    "engines/sglang/test_tiny.py": 202,
    "test_group[sampling]": 196,
    "test_group[parameters]": 189,
    "test_sglang_environment.py": 187,
    "test_group[graphs]": 174,
    "engines/sglang/test_real.py": 148,
    "test_group[scheduling]": 147,
    "sglang draws synchronous": 147,
    "test_group[P-EAGLE]": 144,
    "test_group[real model]": 142,
    "test_group[requests]": 134,
    "test_group[greedy]": 129,
    "engines/sglang/test_parallel_heads.py": 127,
    "test_optimize.py": 126,
    "test_group[families]": 113,
    "engines/test_future_release.py": 110,
    "test_group[ranks]": 107,
    "engines/sglang/test_families.py": 104,
    "traffic/test_servers.py": 93,
    "kernels/test_cuda_emulation.py": 86,
    "core/test_rule.py": 74,
    "sglang requests synchronous": 72,
    "test_group[linear layers]": 70,
    "engines/sglang/test_broken_verifier.py": 68,
    "engines/sglang/test_tensor_parallel.py": 67,
    "test_group[self-test]": 67,
    "kernels/test_cuda_build.py": 64,
    "reference/test_sampled.py": 64,
    "engines/sglang/test_head_exchange.py": 60,
    "bench/test_vllm_server.py": 58,
    "test_group[adapter]": 52,
    "deploy/test_package.py": 46,
    "test_wheel.py": 44,
    "kernels/test_triton_interpreter.py": 42,
    "test_group[heads]": 42,
    "engines/test_engine_contract.py": 40,
    "policy/test_policy_changes.py": 40,
    "engines/sglang/test_lora.py": 36,
    "train/test_resume.py": 36,
    "reference/test_decode.py": 36,
    "bench/serving/test_command.py": 35,
    "heads/test_engine_classes.py": 30,
    "train/test_target_families.py": 30,
    "kernels/test_loader.py": 29,
    "bench/test_demo.py": 28,
    "engines/sglang/test_host_waits.py": 28,
    "engines/sglang/test_launches.py": 24,
    "engines/sglang/test_refusals.py": 23,
    "kernels/test_triton_compile.py": 23,
    "data/test_prepare.py": 23,
    "train/test_distributed.py": 23,
    "evaluate/test_measure.py": 23,
    "engines/sglang/test_graphs.py": 21,
    "test_accidents.py": 21,
    "train/test_loop.py": 19,
    "engines/sglang/test_many_levels.py": 18,
    "engines/sglang/test_perfect_head.py": 18,
    "train/test_known_optimum.py": 16,
    "evaluate/test_check_command.py": 16,
    "bench/test_gpu_steps.py": 16,
    "heads/test_target_table.py": 15,
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
