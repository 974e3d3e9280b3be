"""The worker that vLLM's executor drives on a GPU: the engine's own around our model runner.

`cpu_worker.TreeCPUWorker` is that of a CPU. This module imports nothing that only a CPU has.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from eagle_plugin.runtime.deferred_limit import MOST_BYTES
from eagle_plugin.vllm.chain_kernels import compile_chains
from eagle_plugin.vllm.executor import TreeExecutor, with_drafts
from eagle_plugin.vllm.plugin_config import plugin_config
from eagle_plugin.vllm.ranks import rank_logger
from eagle_plugin.vllm.runner import TreeModelRunner
from eagle_plugin.vllm.selftest import check_rounds, first_rounds

if TYPE_CHECKING:
    from eagle_plugin.vllm.v2_runner import V2TreeModelRunner

logger = logging.getLogger("vllm.eagle_plugin")


def needed_bytes(worker: Worker) -> int:
    """The device memory that the largest step takes for a time, by the profile of vLLM's worker, with what the head has
    not read yet; 0 where the size of the caches was given, and nothing profiled.

    vLLM's number has its estimate of its own graphs in it, which are there by now.
    """
    peak: int = getattr(worker, "peak_activation_memory", 0)
    if peak and envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS:
        peak -= worker.cudagraph_memory_estimate
    return peak + MOST_BYTES if peak else 0


class TreeWorker(Worker):
    """vLLM's ``Worker`` with draft trees."""

    def _make_model_runner(self) -> TreeModelRunner | V2TreeModelRunner:
        """The runner of this worker; the engine calls this when the device is there."""
        if self.use_v2_model_runner:
            from eagle_plugin.vllm.v2_runner import V2TreeModelRunner  # whose kernels only some devices have

            return V2TreeModelRunner(self.vllm_config, self.device)
        return TreeModelRunner(self.vllm_config, self.device)

    def begin_rounds(self) -> None:
        """Capture the functions of a step, test the round and measure it, where all of the engine is warm: its tuned
        kernels are those that serve, and no step of its warm-up counts as served. Compile what eager steps use beside
        it, and set the random seed as the engine did.

        Raises:
            SelfTestFailed: the test found a difference, or something failed before it or in a measurement.
        """
        runner, log = self.model_runner, rank_logger(logger)
        ours = plugin_config(self.vllm_config.speculative_config)
        assert ours is not None
        runner.needed_bytes = needed_bytes(self)
        with first_rounds(runner, ours.subject, log):
            runner.capture_steps()
        check_rounds(runner, ours.subject, log)
        with first_rounds(runner, ours.subject, log):
            runner.choose_by_costs()
        runner.open_mailbox()
        runner.open_features()
        with first_rounds(runner, ours.subject, log):
            compile_chains(runner, log)
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)

    def _maybe_activate_jit_monitor(self) -> None:
        """Begin our rounds at the end of the engine's warm-up, before it watches for kernels that are compiled late."""
        self.begin_rounds()
        super()._maybe_activate_jit_monitor()

    def execute_dummy_batch(self) -> None:
        """Run the target over nothing as the engine does, where engines share its experts and this one is idle."""
        runner = self.model_runner
        assert isinstance(runner, TreeModelRunner)  # V2 serves no such engines
        runner.drafter.is_idle = True
        try:
            super().execute_dummy_batch()
        finally:
            runner.drafter.is_idle = False

    def sample_tokens(self, grammar_output: Any) -> Any:
        """End a step as the engine does; our executor gets the drafts with the tokens."""
        output = super().sample_tokens(grammar_output)
        if self.parallel_config.distributed_executor_backend is TreeExecutor and isinstance(output, ModelRunnerOutput):
            return with_drafts(output, self.take_draft_token_ids())
        return output
