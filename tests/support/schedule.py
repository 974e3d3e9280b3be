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
# Seconds of the groups that take longest, on two cores: the lines "group" of `make test ARGS=--durations=20`.
# Only their order matters; a group that is not named comes after all of these.
SECONDS = {
    "engines/test_future_release.py": 260,
    "sglang draws graphs": 222,
    "test_sglang_environment.py": 220,
    "engines/sglang/test_tiny.py": 216,
    "test_group[sampling]": 201,
    "engines/sglang/test_real.py": 156,
    "kernels/test_cuda_emulation.py": 151,
    "test_group[greedy]": 130,
    "test_group[parameters]": 129,
    "test_group[scheduling]": 122,
    "test_group[requests]": 117,
    "engines/sglang/test_head_exchange.py": 107,
    "test_group[graphs]": 105,
    "sglang draws synchronous": 104,
    "test_group[P-EAGLE]": 97,
    "test_optimize.py": 86,
    "engines/sglang/test_parallel_heads.py": 77,
    "test_group[self-test]": 75,
    "engines/sglang/test_families.py": 45,
    "engines/sglang/test_tensor_parallel.py": 71,
    "capture/test_servers.py": 71,
    "engines/sglang/test_broken_verifier.py": 66,
    "sglang requests synchronous": 64,
    "optimize/test_runner.py": 63,
    "test_group[real model]": 61,
    "sglang requests graphs": 60,
    "deploy/test_package.py": 53,
    "reference/test_sampled.py": 48,
    "core/test_rule.py": 46,
    "bench/test_vllm_server.py": 45,
    "test_group[heads]": 37,
    "test_group[families]": 40,
    "test_wheel.py": 34,
    "kernels/test_cuda_build.py": 33,
    "train/test_target_families.py": 33,
    "bench/test_demo.py": 28,
    "bench/serving/test_command.py": 27,
    "engines/sglang/test_host_waits.py": 25,
    "reference/test_decode.py": 24,
    "train/test_distributed.py": 23,
    "kernels/test_loader.py": 22,
    "train/test_resume.py": 22,
    "compat/test_native.py": 21,
    "kernels/test_int8_linear.py": 20,
    "kernels/test_triton_interpreter.py": 20,
    "engines/sglang/test_many_levels.py": 20,
    "test_accidents.py": 20,
    "heads/test_engine_classes.py": 20,
    "test_group[adapter]": 19,
    "evaluate/test_measure.py": 19,
    "data/test_prepare.py": 19,
    "engines/sglang/test_refusals.py": 19,
    "engines/sglang/test_launches.py": 18,
    "evaluate/test_check_command.py": 18,
    "train/test_loop.py": 17,
    "kernels/test_triton_compile.py": 17,
    "train/test_sources.py": 17,
    "bench/test_compare_commits.py": 15,
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
