"""How `make test` spreads the tests over its workers: what runs in one of them, and which groups start first.

pytest-xdist hands out groups in the order of the collected tests, so that the longest go first and the short ones fill
the gaps at the end. A group is a file, or the files that share servers, or one process of the vLLM environment.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
VLLM_ENVIRONMENT = "test_vllm_environment.py"
# Files whose tests ask the same servers.
SHARED = {
    f"engines/sglang/test_{name}.py": "sglang bigram"
    for name in ("grammar", "logprobs", "metrics", "parameters", "sampling", "seeds")
}
# Seconds of the groups that take longest, on two quiet cores, from `make test ARGS=--durations=60`. Only their order
# matters; a group that is not named comes after all of these.
SECONDS: dict[str, int] = {}


def group_of(path: Path, name: str) -> str:
    """The group of a test: `path` is its file, `name` its own name with the parameters."""
    file = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else path.name
    return name if file == VLLM_ENVIRONMENT else SHARED.get(file, file)


def arrange(items: list[pytest.Item]) -> None:
    """Mark every test with its group and sort the groups, the longest first, without parting them."""
    groups = {id(item): group_of(item.path, item.name) for item in items}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[id(item)]))
    first = {group: -number for number, group in reversed(list(enumerate(groups.values())))}
    items.sort(key=lambda item: (SECONDS.get(groups[id(item)], 0), first[groups[id(item)]]), reverse=True)
