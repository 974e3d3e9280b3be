"""Flags with which a start of the engine would end, or serve wrongly, and which the plugin leaves to vLLM by name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dflash_models import tiny_dflash
from head_edits import config as edit
from head_edits import drop
from vllm.config import VllmConfig
from vllm.model_executor.models import registry
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_configs import configure, needs

from eagle_plugin.runtime.startup import StartRefused
from eagle_plugin.vllm import plugin_config, support, unsupported
from eagle_plugin.vllm.unsupported import unsupported_reasons

pytestmark = pytest.mark.usefixtures("lines")


def left(made: VllmConfig, lines: list[str], named: str) -> None:
    assert not plugin_config.is_served(made.speculative_config)
    (line,) = lines
    assert "is served by vLLM's own worker: " in line and named in line


# ---------------------------------------------------------------------------------------------------------------------
# The layout of KV caches


@pytest.mark.parametrize("layout", ["HND", "LBHNC", "BLHNC", "BLNHC", "BHLNC", "LHBNC"])
def test_another_layout_is_left_to_vllm(
    layout: str, target: Path, head: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    left(configure(target, head), lines, f"VLLM_KV_CACHE_LAYOUT {layout}: only LBNHC or NHD, which are one layout")


@pytest.mark.parametrize("layout", unsupported.LAYOUTS)
def test_two_names_of_our_layout(
    layout: str, target: Path, head: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    assert plugin_config.is_served(configure(target, head).speculative_config) and lines == []


# ---------------------------------------------------------------------------------------------------------------------
# Connectors that vLLM makes of a flag after the plugin was asked


def test_offloading_to_what_was_not_tried(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    made = configure(target, head)
    needs("cache_config", "kv_offloading_size", 1.0)(made)
    needs("cache_config", "kv_offloading_backend", "lmcache")(made)
    (reason,) = unsupported_reasons(made)
    assert reason.startswith("--kv-offloading-size: LMCacheMPConnector has not been tried with draft trees")
    assert made.kv_transfer_config is None  # nothing is changed by looking
    made._post_init_kv_transfer_config()  # as vLLM does it later
    assert unsupported_reasons(made) == [reason]


@pytest.mark.parametrize("simple", ["0", "1"])
def test_vllms_own_offloading_is_served(
    simple: str, target: Path, head: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", simple)
    made = configure(target, head, kv_offloading_size=1.0)
    assert plugin_config.is_served(made.speculative_config) and lines == []


def test_offloading_with_a_target_that_has_no_connector(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    made = configure(target, head)
    monkeypatch.setattr(type(made.model_config), "is_hybrid", True)
    monkeypatch.setattr(unsupported, "GATED_DELTA_NETS", ("LlamaForCausalLM",))
    assert unsupported_reasons(made) == []
    needs("cache_config", "kv_offloading_size", 1.0)(made)
    assert unsupported_reasons(made) == ["--kv-offloading-size: it is not served with target LlamaForCausalLM yet"]


def test_offloading_with_a_block_drafter(target: Path, tmp_path: Path, lines: list[str]) -> None:
    drafter = tiny_dflash(tmp_path / "drafter", target, block=8)
    made = configure(target, drafter, "dflash", kv_offloading_size=1.0)
    left(made, lines, "--kv-offloading-size: it is not served with block drafters yet")


# ---------------------------------------------------------------------------------------------------------------------
# ALiBi


@pytest.mark.parametrize(
    ("name", "alibi", "is_left"),
    [
        ("BloomForCausalLM", None, True),
        ("Step1ForCausalLM", None, True),
        ("FalconForCausalLM", True, True),
        ("FalconForCausalLM", False, False),
    ],
)
def test_alibi(
    name: str, alibi: bool | None, is_left: bool, target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    made = configure(target, head)
    needs("model_config", "model_arch_config", replace(made.model_config.model_arch_config, architectures=[name]))(made)
    made.model_config.hf_text_config.update({} if alibi is None else {"alibi": alibi})
    reason = f"target {name}: attention with ALiBi is not served"
    assert unsupported_reasons(made) == ([reason] if is_left else [])


@pytest.mark.parametrize("name", unsupported.OWN_ATTENTION)
def test_targets_with_attention_of_their_own(
    name: str, target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name in registry._VLLM_MODELS
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    made = configure(target, head)
    needs("model_config", "model_arch_config", replace(made.model_config.model_arch_config, architectures=[name]))(made)
    (reason,) = unsupported_reasons(made)
    assert reason.startswith(f"target {name}: its layers have attention of their own")


# ---------------------------------------------------------------------------------------------------------------------
# A scheduler of the user's


class Patient(Scheduler):
    """Schedules otherwise and gets drafts as vLLM's does."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        return super().schedule(*args, **kwargs)


class Deaf(AsyncScheduler):
    """Keeps no parents of a tree."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        pass


class Other:
    """Implements vLLM's interface without its scheduler."""


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    ("given", "named"),
    [
        (Patient, ""),
        (AsyncScheduler, ""),
        (Deaf, "its update_draft_token_ids is not that of vLLM's Scheduler"),
        (Other, "its update_draft_token_ids and update_draft_token_ids_in_output is not that of vLLM's Scheduler"),
    ],
)
def test_a_scheduler_that_may_not_keep_the_parents_of_nodes(
    as_text: bool, given: type, named: str, target: Path, head: Path, lines: list[str]
) -> None:
    name = f"{given.__module__}.{given.__qualname__}"
    made = configure(target, head, scheduler_cls=name if as_text else given)
    if named:
        left(made, lines, f"--scheduler-cls {name}: {named}")
    else:
        assert plugin_config.is_served(made.speculative_config) and lines == []


# ---------------------------------------------------------------------------------------------------------------------
# Heads whose weights are not in their folder


@pytest.fixture
def own_head(head: Path, tmp_path: Path) -> Path:
    return shutil.copytree(head, tmp_path / "head")


@pytest.fixture
def without_weights(own_head: Path) -> Path:
    (own_head / "model.safetensors").unlink()
    return own_head


@pytest.mark.parametrize(
    "options",
    [{"load_format": "dummy"}, {"load_format": "auto", "speculative": {"draft_load_config": {"load_format": "dummy"}}}],
)
def test_a_head_whose_weights_are_not_read(
    options: dict[str, Any], target: Path, without_weights: Path, lines: list[str]
) -> None:
    made = configure(target, without_weights, **options)
    assert plugin_config.is_served(made.speculative_config) and lines == []


@pytest.mark.parametrize(
    "options",
    [{}, {"load_format": "dummy", "speculative": {"draft_load_config": {"load_format": "auto"}}}],
)
def test_a_head_whose_weights_are_missing(options: dict[str, Any], target: Path, without_weights: Path) -> None:
    with pytest.raises(StartRefused, match="has no weights, wanted model.safetensors"):
        configure(target, without_weights, **options)


def test_weights_that_are_there_are_checked(target: Path, own_head: Path) -> None:
    """A server with made-up weights of a head that does not fit would end in its first forward."""
    drop("fc.weight")(own_head)
    with pytest.raises(StartRefused, match=r"fc\.weight"):
        configure(target, own_head, load_format="dummy")


def test_vllms_own_error_is_kept_where_weights_are_not_read(target: Path, without_weights: Path) -> None:
    edit(architectures=["Unknown"])(without_weights)
    with pytest.raises(Exception, match=r"(?i)unknown") as raised:
        configure(target, without_weights, load_format="dummy")
    assert not isinstance(raised.value, StartRefused)
    assert support._can_read(str(target), str(without_weights), "auto")
