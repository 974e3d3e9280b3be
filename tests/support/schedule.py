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
    "test_group[sampling]": 200,
    "engines/sglang/test_tiny.py": 190,
    "test_group[requests]": 180,
    "test_group[parameters]": 170,
    "test_group[greedy]": 130,
    "test_group[scheduling]": 120,
    "engines/sglang/test_real.py": 110,
    "kernels/test_cuda_emulation.py": 110,
    "test_optimize.py": 90,
    "test_group[logprobs]": 90,
    "test_group[heads]": 90,
    "test_group[real model]": 90,
    "bench/test_vllm_server.py": 85,
    "kernels/test_sanitizers.py": 70,
    "evaluate/test_measure.py": 60,
    "kernels/test_cuda_build.py": 60,
    "test_group[adapter]": 60,
    "test_wheel.py": 60,
    "compat/test_stock_server.py": 50,
    "engines/sglang/test_refusals.py": 50,
    "reference/test_decode.py": 50,
    "reference/test_sampled.py": 50,
    "engines/sglang/test_perfect_head.py": 40,
    "test_accidents.py": 40,
    "heads/test_engine_classes.py": 30,
    "kernels/test_triton_interpreter.py": 30,
    "kernels/test_loader.py": 30,
    "heads/test_target_table.py": 20,
    "core/test_rule.py": 20,
    "data/generation/test_chat.py": 15,
    "data/test_prepare.py": 15,
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
