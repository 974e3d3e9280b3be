"""Lists what of a configuration of vLLM decides which kernels its rounds run: records and measured costs belong to
these."""

from __future__ import annotations

import os
from typing import Any

# Of vLLM: how ranks add up what each of them has.
ALL_REDUCE = (
    *("VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC", "VLLM_ALLREDUCE_USE_SYMM_MEM"),
    *("VLLM_DISABLE_PYNCCL", "VLLM_FLASHINFER_ALLREDUCE_BACKEND", "VLLM_USE_NCCL_SYMM_MEM"),
)


def kernel_settings(vllm_config: Any) -> dict[str, Any]:
    """Of a ``VllmConfig``: JSON values by name."""
    return {
        "lora": vllm_config.lora_config is not None,
        "attention_backend": str(vllm_config.attention_config.backend),
        "attention_backend_per_kind": str(sorted(vllm_config.attention_config.backend_per_kind.items())),
        "moe_backend": str(vllm_config.kernel_config.moe_backend),
        "data_parallel": vllm_config.parallel_config.data_parallel_size,
    }


def cost_settings(vllm_config: Any) -> dict[str, Any]:
    """What else of a ``VllmConfig`` and of the environment changes how long a round takes, as a worker knows it.

    Measured costs belong to these alone: vLLM changes some of them between the start of the engine and that of the
    worker, and the record of a failed test would be lost.
    """
    parallel = vllm_config.parallel_config
    return {
        "custom_all_reduce": not parallel.disable_custom_all_reduce,
        "all2all_backend": str(parallel.all2all_backend),
        "passes": vllm_config.compilation_config.pass_config.compute_hash(),
        "head_quantization": str(vllm_config.speculative_config.draft_model_config.quantization),
        **{name: os.environ[name] for name in ALL_REDUCE if name in os.environ},
    }
