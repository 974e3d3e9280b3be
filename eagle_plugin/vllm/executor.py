"""Lets a step's drafts come with its tokens: vLLM's own executor, between the scheduler and our worker, does the rest.

vLLM asks the worker's process for the drafts in a call of their own after every step, also when nothing was drafted.
Two processes that wait for each other pay for that twice: with a step of 60 ms on two cores it was 2 ms.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

_DRAFTS = "eagle_plugin_drafts"  # attribute of a worker's output, which travels with it


class TreeExecutor(MultiprocExecutor):
    """vLLM's ``MultiprocExecutor`` for a `TreeWorker`."""

    _output: Any = None  # of the latest step, if it brought drafts

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Begin a step as the engine does."""
        self._output = None
        return super().execute_model(scheduler_output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """End a step as the engine does, and keep the drafts that came with its tokens."""
        output = super().sample_tokens(grammar_output, non_block)
        self._output = None if non_block else output
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts of the latest step; asked of the worker where they have not come with it."""
        if hasattr(self._output, _DRAFTS):
            return getattr(self._output, _DRAFTS)
        return super().take_draft_token_ids()


def with_drafts(output: ModelRunnerOutput, drafts: DraftTokenIds | None) -> ModelRunnerOutput:
    """A worker's output with the drafts of its step, for a `TreeExecutor`; the given one is not changed.

    It may be one that the engine shares between steps.
    """
    output = copy(output)
    setattr(output, _DRAFTS, drafts)
    return output
