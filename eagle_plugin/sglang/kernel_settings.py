"""Lists what of a server's flags decides which kernels its rounds run: records and measured costs belong to these."""

from __future__ import annotations

from typing import Any

# As the user gave them: what the engine makes of "auto" follows from its version, the model and the device. Those that
# change between the start of the engine and that of our worker would lose the record of a failed test.
FLAGS = (
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("speculative_draft_attention_backend", "enable_torch_compile", "torch_compile_max_bs"),
    *("fp8_gemm_runner_backend", "fp4_gemm_runner_backend", "bf16_gemm_backend"),
    *("moe_runner_backend", "moe_a2a_backend", "speculative_moe_runner_backend", "speculative_moe_a2a_backend"),
    *("ep_size", "attn_dp_size", "enable_dp_lm_head", "lora_backend", "speculative_draft_model_quantization"),
    *("disable_custom_all_reduce", "enable_mscclpp", "enable_symm_mem", "enable_torch_symm_mem", "enable_nccl_nvls"),
    *("flashinfer_allreduce_fusion_backend", "enforce_disable_flashinfer_allreduce_fusion"),
    *("enable_fused_moe_sum_all_reduce", "disable_shared_experts_fusion", "enforce_shared_experts_fusion"),
)


def kernel_settings(server_args: Any) -> dict[str, Any]:
    """Of an SGLang ``ServerArgs``: JSON values by the name of their flag; those with the engine's default are None."""
    values = {name: getattr(server_args, name) for name in FLAGS}
    plain = {name: value if isinstance(value, bool | int | None) else str(value) for name, value in values.items()}
    return {**plain, "lora": bool(server_args.enable_lora or server_args.lora_paths)}
