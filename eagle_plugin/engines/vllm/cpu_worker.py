"""Worker and model runner of a CPU: the engine's own of a CPU, with the methods of ours."""

from __future__ import annotations

from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from eagle_plugin.engines.vllm.runner import TreeModelRunner
from eagle_plugin.engines.vllm.worker import TreeWorker


class TreeCPUModelRunner(TreeModelRunner, CPUModelRunner):
    """vLLM's ``CPUModelRunner`` with draft trees."""


class TreeCPUWorker(TreeWorker, cpu_worker.CPUWorker):
    """vLLM's ``CPUWorker`` with draft trees."""

    def init_device(self) -> None:
        """Prepare the device as the engine does; its worker names the class of its runner in its module."""
        engine_runner = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = TreeCPUModelRunner  # type: ignore[misc]
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = engine_runner  # type: ignore[misc]
