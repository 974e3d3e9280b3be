"""Requests with LoRA adapters beside requests without: each has the text of plain decoding with its adapter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from adapter_requests import adapted, ask, check_that_adapters_count, post
from serving import OVERLAP, accept_length, responses, serving, tiny_spec

pytest.importorskip("sglang")
pytestmark = pytest.mark.server


def test_mixed_adapters(tmp_path: Path) -> None:
    """Three adapters for two places of a batch; one comes while the servers run, and one goes."""
    models = adapted(tmp_path)
    plugin_flags = (*models.flags, "--chunked-prefill-size", "64")
    specs = [
        tiny_spec(models.target, extra_flags=models.flags),
        tiny_spec(models.target, models.head, (3, 4, 16), extra_flags=plugin_flags, environment=OVERLAP),
    ]
    with serving(specs, tmp_path / "logs") as (plain, plugin):
        for server in (plain, plugin):
            post(server, "load_lora_adapter", {"lora_name": "third", "lora_path": str(models.third)})
        expected = responses(ask(plain))
        check_that_adapters_count(expected)
        for _ in range(2):  # then from the prefix cache
            answers = ask(plugin)
            assert responses(answers) == expected
            assert accept_length(answers) > 1.2
        post(plugin, "unload_lora_adapter", {"lora_name": "first"})
        assert responses(ask(plugin, [None, "third"])) == [e for i, e in enumerate(expected) if i % 4 in (0, 3)]


@pytest.mark.matrix
def test_adapters_come_and_go_while_requests_run(tmp_path: Path) -> None:
    """Rounds of other requests go on while an adapter is loaded, used and unloaded, several times."""
    models = adapted(tmp_path)
    specs = [
        tiny_spec(models.target, extra_flags=models.flags),
        tiny_spec(models.target, models.head, (3, 4, 16), extra_flags=models.flags, environment=OVERLAP),
    ]
    third = {"lora_name": "third", "lora_path": str(models.third)}
    with serving(specs, tmp_path / "logs") as (plain, plugin), ThreadPoolExecutor(1) as beside:
        post(plain, "load_lora_adapter", third)
        expected = responses(ask(plain))
        check_that_adapters_count(expected)
        changes = 0
        for _ in range(3):
            others = beside.submit(ask, plugin, [None, "first", "second"])
            while not others.done():
                post(plugin, "load_lora_adapter", third)
                assert responses(ask(plugin, ["third"])) == expected[3::4]
                post(plugin, "unload_lora_adapter", {"lora_name": "third"})
                changes += 1
            assert responses(others.result()) == [e for i, e in enumerate(expected) if i % 4 != 3]
        assert changes >= 3
