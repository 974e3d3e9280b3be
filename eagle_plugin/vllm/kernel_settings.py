"""Lists what of a configuration of vLLM decides which kernels its rounds run: records and measured costs belong to
these."""

from __future__ import annotations

from typing import Any


def kernel_settings(vllm_config: Any) -> dict[str, Any]:
    """Of a ``VllmConfig``: JSON values by name."""
    return {
        "lora": vllm_config.lora_config is not None,
        "attention_backend": str(vllm_config.attention_config.backend),
        "attention_backend_per_kind": str(sorted(vllm_config.attention_config.backend_per_kind.items())),
        "moe_backend": str(vllm_config.kernel_config.moe_backend),
        "data_parallel": vllm_config.parallel_config.data_parallel_size,
    }
