"""Model runner of a CPU: vLLM's own V2 runner of a CPU, with the methods of ours. Its kernels need Triton there."""

from __future__ import annotations

from vllm.v1.worker.cpu.model_runner import CPUModelRunner

from eagle_plugin.vllm.v2_runner import V2TreeModelRunner


class V2TreeCPUModelRunner(V2TreeModelRunner, CPUModelRunner):
    """vLLM's V2 ``CPUModelRunner`` with draft trees."""
