"""A plugin for the test server: what SGLang's quantised layers call and a CPU without AMX does not have, in torch.

SGLang's own code loads the checkpoint and chooses the layers' methods; AWQ's and MXFP4's weights are unpacked by these,
where the engine would call a kernel of a GPU. So they are tried in float32 too, where equality of texts is a proof,
though SGLang allows them in 16 bits only.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from quantised_models import E2M1
from torch import Tensor


def upcast_from_mxfp(blocks: Tensor, scales: Tensor, target_dtype: Any, axis: int) -> Tensor:
    """``triton_kernels``' function: two codes in each byte [..., in / 2], the low one first; a scale for 32 of them."""
    assert axis == -1
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
    values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    exponents = (scales.int() - 127).repeat_interleave(32, -1)
    return torch.ldexp(values, exponents).to(torch.get_default_dtype())  # of the model; exact in 16 bits too


def register() -> None:
    """Entry point ``sglang.srt.plugins``."""
    from sglang.kernels.ops.quantization.awq_triton import awq_dequantize_decomposition
    from sglang.srt.hardware_backend.gpu.quantization import awq_kernels
    from sglang.srt.layers.quantization.awq import AWQConfig
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config

    awq_kernels.awq_dequantize = awq_dequantize_decomposition
    module: Any = ModuleType("triton_kernels.numerics_details.mxfp")
    module.upcast_from_mxfp = upcast_from_mxfp
    for name in ("triton_kernels", "triton_kernels.numerics_details"):
        sys.modules[name] = ModuleType(name)
    sys.modules[module.__name__] = module
    for config in (AWQConfig, Mxfp4Config):
        config.get_supported_act_dtypes = lambda self: [torch.float32, torch.bfloat16, torch.float16]
