"""Memory: the limit of a container, what a server needs at the least, and why a process ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_plugin.bench import memory
from eagle_plugin.bench.spec import ServerSpec


@pytest.mark.parametrize(
    ("code", "log", "lacked"),
    [
        (-9, "", True),
        (137, "loading", True),
        (1, "Rank 0 scheduler died during initialization (exit code: -9).", True),
        (1, "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore_0': -9}", True),
        (1, "terminate called after throwing an instance of 'std::bad_alloc'", True),
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8", True),
        (-9, "Scheduler hit an exception: Traceback (most recent call last):\nValueError: no", False),
        (-9, "Scheduler hit an exception: Traceback (most recent call last):\nMemoryError", True),
        (-15, "", False),
        (1, "Failed core proc(s): {'EngineCore_0': 1}", False),
        (1, "ValueError: hidden size 7", False),
        (None, "", False),
    ],
)
def test_a_process_that_the_system_killed_is_told_from_one_that_failed(code, log, lacked) -> None:
    assert memory.lacked_memory(code, log) is lacked


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    free = memory.available_bytes()
    assert free > 0  # no such files: what the system has
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory.available_bytes() == 400
    (tmp_path / "memory.max").write_text("500\n")
    assert memory.available_bytes() == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes() > 1000


def test_a_server_needs_its_weights_and_its_cache(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    spec = ServerSpec(tmp_path, "plain", max_total_tokens=10)
    assert memory.least_bytes(spec) == 1000 + 10 * (2 * 3 * 2 * 16) * 2
    (tmp_path / "config.json").write_text("{}")
    assert memory.least_bytes(spec) == 0  # the engine says what is wrong


def test_another_try_waits_for_what_was_free(tmp_path: Path) -> None:
    assert memory.enough_to_try_again(1000) == 950
    assert memory.enough_to_try_again(1000, needed=2000) == 2000
