"""What vLLM's quantised layers call and its build for CPUs without AVX-512 and AMX does not have, written in torch.

vLLM's own code loads the checkpoint, chooses the layers' methods and packs the weights; only the last products are
ours: the weights are unpacked, and multiplied in the dtype of the input. So they are tried in float32 too, where
equality of texts is a proof, though vLLM allows some of these formats in 16 bits only.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

NIBBLES = torch.arange(0, 32, 4)


def _unpack(packed: Tensor) -> Tensor:
    """The eight codes of each int32 [..., n] as [..., 8 n]."""
    return ((packed[..., None] >> NIBBLES) & 15).flatten(-2)


def gemm_wna16(
    input: Tensor,
    q_weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> Tensor:
    """``_custom_ops.cpu_gemm_wna16``: q_weight holds 16 outputs of all inputs side by side."""
    assert pack_factor == 8
    inputs, outputs = input.shape[-1], scales.shape[1]
    codes = _unpack(q_weight.view(outputs // 16, inputs, 2)).transpose(0, 1).reshape(inputs, outputs)
    size = inputs // len(scales)
    zero = 8 if zeros is None else _unpack(zeros).repeat_interleave(size, 0)
    weight = (codes - zero) * scales.repeat_interleave(size, 0)
    return torch.nn.functional.linear(input, weight.T.to(input.dtype), bias)


def fp8_scaled_mm(
    input: Tensor, weight: Tensor, scales: Tensor, block: list[int], bias: Tensor | None, dtype: Any, is_vnni: bool
) -> Tensor:
    """``_C.fp8_scaled_mm_cpu``."""
    assert is_vnni
    rows, columns = weight.shape
    scale = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return torch.nn.functional.linear(input, (weight.float() * scale).to(dtype), bias)


def install(patch: pytest.MonkeyPatch) -> None:
    """Let the layers call these."""
    patch.setattr(ops, "cpu_gemm_wna16", gemm_wna16)
    kernel = CPUFp8BlockScaledMMKernel
    patch.setattr(kernel, "is_supported", classmethod(lambda cls, capability=None: (True, None)))
    patch.setattr(kernel, "can_implement", classmethod(lambda cls, config: (True, None)))  # blocks of 32
    patch.setattr(torch.ops._C, "fp8_scaled_mm_cpu", fp8_scaled_mm, raising=False)
    patch.setattr(torch.ops._C, "convert_weight_packed", lambda w: w.detach().as_subclass(Tensor), raising=False)
    for config in (AutoAWQConfig, AutoGPTQConfig, Fp8Config):
        dtypes = [torch.float32, torch.bfloat16, torch.float16]
        patch.setattr(config, "get_supported_act_dtypes", lambda self, dtypes=dtypes: dtypes)
