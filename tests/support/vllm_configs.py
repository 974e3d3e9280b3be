"""What vLLM makes of flags, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

DEFAULTS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 2, "enforce_eager": True}


def configure(target: Path, head: Path, method: str = "eagle3", **options: Any) -> VllmConfig:
    """The configuration of an engine; `speculative` adds to its speculative configuration."""
    speculative = {"method": method, "model": str(head), "num_speculative_tokens": 7}
    speculative |= options.pop("speculative", {})
    return EngineArgs(model=str(target), speculative_config=speculative, **DEFAULTS | options).create_engine_config()


def needs(part: str, attribute: str, value: Any) -> Callable[[VllmConfig], None]:
    """A change of a configuration: its part gets this value."""
    return lambda config: object.__setattr__(getattr(config, part), attribute, value)
