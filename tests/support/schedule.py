"""How `make test` spreads the tests over its workers: what runs in one of them, and which groups start first.

A group is a file, or the files that share servers, or one process of the vLLM environment. pytest-xdist hands out the
groups in the order of the collected tests, so that the longest go first and short ones fill the gaps at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

VLLM_ENVIRONMENT = "test_vllm_environment.py"
# Files whose tests ask the same servers.
SHARED = {
    f"engines/sglang/test_{name}.py": "sglang bigram"
    for name in ("grammar", "logprobs", "metrics", "parameters", "sampling", "seeds")
}
# Seconds of the groups that take longest, on two quiet cores: the lines "group" of `make test ARGS=--durations=20`.
# Only their order matters; a group that is not named comes after all of these.
SECONDS = {
    "sglang bigram": 260,
    "engines/sglang/test_tiny.py": 240,
    "test_group[sampling]": 200,
    "test_group[greedy]": 180,
    "test_group[requests]": 170,
    "test_group[parameters]": 170,
    "test_group[scheduling]": 150,
    "kernels/test_cuda_emulation.py": 150,
    "kernels/test_sanitizers.py": 120,
    "kernels/test_cuda_build.py": 100,
    "test_group[logprobs]": 90,
    "test_group[heads]": 90,
    "test_group[real model]": 90,
    "engines/sglang/test_real.py": 90,
    "test_optimize.py": 90,
    "bench/test_vllm_server.py": 70,
    "engines/sglang/test_refusals.py": 60,
    "test_group[adapter]": 60,
    "core/test_rule.py": 60,
    "compat/test_stock_server.py": 50,
    "test_schedule.py": 10,
}


def group_of(nodeid: str) -> str:
    """The group of a test, by its identifier "tests/FOLDER/FILE::NAME"."""
    path, _, name = nodeid.partition("::")
    file = path.removeprefix("tests/")
    return name if file == VLLM_ENVIRONMENT else SHARED.get(file, file)


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
