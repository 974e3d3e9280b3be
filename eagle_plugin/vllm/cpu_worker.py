"""Worker and model runner of a CPU: the engine's own of a CPU, with the methods of ours."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from eagle_plugin.runtime.huge_pages import use_huge_pages
from eagle_plugin.vllm.ranks import rank_logger
from eagle_plugin.vllm.runner import TreeModelRunner
from eagle_plugin.vllm.worker import TreeWorker


class TreeCPUModelRunner(TreeModelRunner, CPUModelRunner):
    """vLLM's ``CPUModelRunner`` with draft trees."""


class TreeCPUWorker(TreeWorker, cpu_worker.CPUWorker):
    """vLLM's ``CPUWorker`` with draft trees."""

    def init_device(self) -> None:
        """Prepare the device as the engine does; its worker names the class of its runner in a module."""
        module: Any = cpu_worker
        ours: type = TreeCPUModelRunner
        if self.use_v2_model_runner:
            from vllm.v1.worker.cpu import model_runner

            from eagle_plugin.vllm.v2_cpu_runner import V2TreeCPUModelRunner

            module, ours = model_runner, V2TreeCPUModelRunner
        engines = module.CPUModelRunner
        module.CPUModelRunner = ours
        try:
            super().init_device()
        finally:
            module.CPUModelRunner = engines

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as the engine does, then begin our rounds, with the models and caches in huge pages before."""
        use_huge_pages(rank_logger(logging.getLogger("vllm.eagle_plugin")))
        times = super().compile_or_warm_up_model()
        self.begin_rounds()
        return times
