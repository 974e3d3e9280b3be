"""A step's drafts come with its tokens: no call of the worker's process of their own."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from engine_signatures import assignments, calls, holds, parameters, returned
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from eagle_plugin.vllm.executor import TreeExecutor, with_drafts

DRAFTS = DraftTokenIds(["a", "b"], [[5, 6], []])
ASKED = DraftTokenIds(["a"], [[7]])  # what the worker answers when it is asked


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> TreeExecutor:
    """Without processes: its worker's output for a step is `made.output`."""
    made = object.__new__(TreeExecutor)
    made.output = EMPTY_MODEL_RUNNER_OUTPUT  # type: ignore[attr-defined]
    monkeypatch.setattr(MultiprocExecutor, "execute_model", lambda self, scheduled, non_block=False: None)
    monkeypatch.setattr(MultiprocExecutor, "sample_tokens", lambda self, grammar, non_block=False: self.output)
    monkeypatch.setattr(MultiprocExecutor, "take_draft_token_ids", lambda self: ASKED)
    return made


def step(executor: Any, output: Any, non_block: bool = False) -> None:
    """One step of vLLM's loop; the output has been in another process."""
    executor.output = pickle.loads(pickle.dumps(output))
    executor.execute_model(None, non_block=True)
    executor.sample_tokens(None, non_block)


@pytest.mark.parametrize("drafts", [DRAFTS, None])
def test_drafts_come_with_the_tokens(executor: TreeExecutor, drafts: DraftTokenIds | None) -> None:
    step(executor, with_drafts(EMPTY_MODEL_RUNNER_OUTPUT, drafts))
    assert executor.take_draft_token_ids() == drafts
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, "eagle_plugin_drafts")  # vLLM shares it between steps


def test_the_worker_is_asked_where_they_did_not_come(executor: TreeExecutor) -> None:
    step(executor, EMPTY_MODEL_RUNNER_OUTPUT)
    assert executor.take_draft_token_ids() == ASKED
    step(executor, with_drafts(EMPTY_MODEL_RUNNER_OUTPUT, DRAFTS), non_block=True)  # a future, whose output comes later
    assert executor.take_draft_token_ids() == ASKED


def test_drafts_of_an_earlier_step_are_gone(executor: TreeExecutor) -> None:
    step(executor, with_drafts(EMPTY_MODEL_RUNNER_OUTPUT, DRAFTS))
    executor.execute_model(None, non_block=True)  # a step that samples nothing
    assert executor.take_draft_token_ids() == ASKED


def test_drafts_are_asked_for_after_every_step() -> None:
    """Which our executor answers itself: it keeps the drafts that the worker's output of `sample_tokens` brings."""
    for name in ("execute_model", "sample_tokens", "take_draft_token_ids"):
        assert parameters(getattr(TreeExecutor, name)) == parameters(getattr(MultiprocExecutor, name))
    assert calls(EngineCore.step, "self.model_executor.sample_tokens") == [
        "self.model_executor.sample_tokens(grammar_output)"
    ]
    assert holds(EngineCore.post_step, "draft_token_ids = self.model_executor.take_draft_token_ids()")
    assert returned(CPUWorker.sample_tokens) == ["self.model_runner.sample_tokens(grammar_output)"]
    assert not hasattr(ModelRunnerOutput, "__slots__")
    assert "parallel_config.distributed_executor_backend" in assignments(
        Executor.get_class, "distributed_executor_backend"
    )
    assert repr("mp") in assignments(CpuPlatform, "parallel_config.distributed_executor_backend")
