"""Holds what the plugin adds to vLLM's speculative configuration where it serves; it travels to every process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_plugin.core.shape import Shape

if TYPE_CHECKING:
    from eagle_plugin.selftest.subject import Subject

_FIELD = "eagle_plugin"


@dataclass(frozen=True)
class PluginConfig:
    """What a worker of ours has to know beside vLLM's own settings."""

    caps: Shape  # of the trees
    reports: Path | None = None  # the folder in which each engine of the server reports what its policy does
    subject: Subject | None = None  # of the self-test of the real round; None where nothing is tested
    v2: bool = False  # whether our worker's model runner is a V2 runner of vLLM
    engines: int = 1  # of the server; vLLM lets an engine that steps alone forget the others
    draft_slots: int = 0  # cache slots after a request's tokens that its drafts write


def set_plugin_config(speculative_config: Any, config: PluginConfig) -> None:
    """Let our worker serve a vLLM ``SpeculativeConfig``."""
    setattr(speculative_config, _FIELD, config)


def plugin_config(speculative_config: Any) -> PluginConfig | None:
    """What was set; None where our worker does not serve this ``SpeculativeConfig``."""
    return getattr(speculative_config, _FIELD, None)


def is_served(speculative_config: Any) -> bool:
    """Whether our worker serves the configuration that this ``SpeculativeConfig`` is part of."""
    return plugin_config(speculative_config) is not None


def reserve_draft_slots(original: Any, vllm_config: Any) -> int:
    """AROUND ``VllmConfig.num_lookahead_tokens``, the slots that are reserved after the tokens of a request: as many as
    our drafts write, where our worker serves, which in deep trees are more than drafted tokens."""
    ours, slots = plugin_config(vllm_config.speculative_config), original(vllm_config)
    return slots if ours is None else max(slots, ours.draft_slots)


def caps_of(speculative_config: Any) -> Shape:
    """The caps of our worker's trees, where it serves."""
    config = plugin_config(speculative_config)
    assert config is not None
    return config.caps
