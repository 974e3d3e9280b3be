"""Keeps what vLLM compiles where our worker serves apart from what it compiles elsewhere.

vLLM keeps compiled models on disk under a hash of the configuration, in which neither the worker nor the attention of
its layers counts. Of two graphs with one hash, the later server loads the earlier one's: without the operation that
stores keys and values, which our attention does itself. ``VllmConfig.compute_hash`` also names the measured memory that
``VLLM_ENABLE_STARTUP_PLAN=1`` keeps.
"""

from __future__ import annotations

import os
from typing import Any

import torch

import eagle_plugin
from eagle_plugin.common.devices import device_key
from eagle_plugin.core.shape import Shape
from eagle_plugin.runtime import draft_weights, target_weights
from eagle_plugin.selftest.record import sources_digest

KEY = "eagle_plugin_compiled"  # in vLLM's additional_config, which the hash has as a whole


def set_compile_key(vllm_config: Any, caps: Shape) -> None:
    """Put into a vLLM ``VllmConfig`` what the graphs of our worker depend on beside that configuration.

    Its `additional_config` is a dictionary. caps: of the trees; the memory of our own graphs depends on them.
    """
    kind = vllm_config.device_config.device_type
    found: dict[str, Any] = {
        "version": eagle_plugin.__version__,
        "sources": sources_digest(kind),
        "caps": caps._asdict(),
    }
    if kind == "cpu":  # which of our operators are in the graphs
        found["cpu"] = device_key(torch.device("cpu"))["device"]
        found |= {name: os.environ.get(name, "1") for name in (draft_weights.SWITCH, target_weights.SWITCH)}
    vllm_config.additional_config = {**vllm_config.additional_config, KEY: found}
