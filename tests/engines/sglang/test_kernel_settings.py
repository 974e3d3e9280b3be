"""A record of the self-test and measured costs belong to the flags that decide which kernels a round runs."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from engine_signatures import calls

pytest.importorskip("sglang")

from sglang.srt.server_args import ServerArgs

from eagle_plugin.sglang import round_costs, selftest
from eagle_plugin.sglang.kernel_settings import FLAGS, kernel_settings

GIVEN = {name: getattr(ServerArgs(model_path="unread"), name) for name in (*FLAGS, "enable_lora", "lora_paths")}


def settings(**changes: Any) -> str:
    """As a key is written."""
    return json.dumps(kernel_settings(SimpleNamespace(**(GIVEN | changes))), sort_keys=True)


@pytest.mark.parametrize("name", [*FLAGS, "enable_lora"])
def test_every_flag_makes_another_key(name: str) -> None:
    assert settings() == settings()  # the control
    other = {int: 2, bool: not GIVEN[name]}.get(type(GIVEN[name]), "another")
    assert settings(**{name: other}) != settings()


def test_adapters_of_a_start_count_without_their_flag() -> None:
    assert settings(lora_paths=["name=folder"]) == settings(enable_lora=True) != settings(lora_paths=[])


def test_the_head_and_the_all_reduce_count() -> None:
    named = {"speculative_draft_model_quantization", "disable_custom_all_reduce", "enable_mscclpp", "enable_symm_mem"}
    assert named <= set(FLAGS)


def test_both_keys_have_them() -> None:
    assert calls(selftest.subject_of, "kernel_settings") == ["kernel_settings(runner.server_args)"]
    assert calls(selftest.subject_of, "policy_mode") and calls(selftest.subject_of, "wants_lookups")
    assert calls(round_costs._key, "kernel_settings") == ["kernel_settings(arguments)"]
