"""Watches the steps of a vLLM engine for what a host would wait for on a GPU.

Watched are the runner's methods that ours replace, with what they call; the parts of them that are the engine's own are
not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_waits import Findings, Functions, Operations
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

WATCHED = ("_prepare_inputs", "_build_attention_metadata", "_sample", "propose_draft_token_ids")


class Guard:
    """Around the methods of a runner in steps without a prompt."""

    def __init__(self, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.findings, self.steps, self._runner = Findings(), 0, served
        for name in WATCHED:
            monkeypatch.setattr(served, name, self._watched(getattr(served, name), name == "_sample"))
            if name in ("_prepare_inputs", "_build_attention_metadata"):
                monkeypatch.setattr(GPUModelRunner, name, self._unwatched(getattr(GPUModelRunner, name)))

    def _watched(self, method: Callable[..., Any], counts: bool) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            state = self._runner._state
            if state is None or not state.batch.uniform or state.batch.width == 1:
                return method(*arguments, **options)
            self.steps += counts
            with Functions(self.findings), Operations(self.findings):
                return method(*arguments, **options)

        return call

    def _unwatched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
                return method(*arguments, **options)

        return call
