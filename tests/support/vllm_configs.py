"""What vLLM makes of flags, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.config import vllm as vllm_config_module
from vllm.engine.arg_utils import EngineArgs

from eagle_plugin.selftest.launch import ANSWERED, Answer
from eagle_plugin.selftest.subject import Subject
from eagle_plugin.vllm import plugin, selftest, unsupported

DEFAULTS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 2, "enforce_eager": True}


def configure(target: Path, head: Path, method: str = "eagle3", **options: Any) -> VllmConfig:
    """The configuration of an engine; `speculative` adds to its speculative configuration."""
    speculative = {"method": method, "model": str(head), "num_speculative_tokens": 7}
    speculative |= options.pop("speculative", {})
    return EngineArgs(model=str(target), speculative_config=speculative, **DEFAULTS | options).create_engine_config()


def needs(part: str, attribute: str, value: Any) -> Callable[[VllmConfig], None]:
    """A change of a configuration: its part gets this value."""
    return lambda config: object.__setattr__(getattr(config, part), attribute, value)


def of_a_gpu(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> VllmConfig:
    """The configuration of a GPU as it is when the plugin sees it."""
    plugin.register()  # vLLM does it with the first configuration, unless the plugin is switched off
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    made = configure(target, head, **options)
    monkeypatch.setenv("EAGLE_PLUGIN", "force")
    monkeypatch.setattr(vllm_config_module, "HAS_TRITON", True)
    object.__setattr__(made.device_config, "device_type", "cuda")
    made.parallel_config.worker_cls = unsupported.ENGINE_WORKERS["cuda"]
    made.scheduler_config.async_scheduling = True
    return made


def answering(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> list[Subject]:
    """Answers for the process that is asked about a GPU; the subjects that it was asked about."""
    asked: list[Subject] = []
    monkeypatch.setenv(ANSWERED, "{}")  # so that what is answered ends with the test
    monkeypatch.setattr(selftest, "ask", lambda subject: asked.append(subject) or answer)
    return asked
