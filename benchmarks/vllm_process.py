"""vLLM's engine core inside the process of a benchmark."""

from __future__ import annotations

from typing import Any

# To be set before vLLM is imported: one process, quiet, on the threads of OMP_NUM_THREADS.
ENVIRONMENT = {
    "EAGLE_POLICY": "fixed",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def runner_of(llm: Any) -> Any:
    """The model runner of a `vllm.LLM` in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
