"""The worker that vLLM's executor drives: the engine's own CPU worker around our model runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker import cpu_worker

from eagle_plugin.engines.vllm.executor import TreeExecutor, with_drafts
from eagle_plugin.engines.vllm.runner import TreeModelRunner


class TreeCPUWorker(cpu_worker.CPUWorker):
    """vLLM's ``CPUWorker`` with draft trees."""

    def init_device(self) -> None:
        """Prepare the device as the engine does; its worker names the class of its runner in its module."""
        engine_runner = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = TreeModelRunner  # type: ignore[misc]
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = engine_runner  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as the engine does, after which it sets the random seed; before that, measure what rounds cost."""
        self.model_runner.choose_by_costs()
        self.model_runner.open_mailbox()
        return super().compile_or_warm_up_model()

    def sample_tokens(self, grammar_output: Any) -> Any:
        """End a step as the engine does; our executor gets the drafts with the tokens."""
        output = super().sample_tokens(grammar_output)
        if self.parallel_config.distributed_executor_backend is TreeExecutor and isinstance(output, ModelRunnerOutput):
            return with_drafts(output, self.take_draft_token_ids())
        return output
