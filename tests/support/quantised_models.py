"""Quantised copies of tiny targets and heads, in the formats and under the names that the formats' own tools write.

Each tool quantises the projections of the layers. What it stores for a weight w [out, in] is made here from the
definition of the format: scales of the largest value, codes rounded to the nearest.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from tiny_checkpoints import read_config, write_config
from torch import Tensor

GROUP = 32  # inputs that share a scale
BLOCK = (32, 32)  # outputs and inputs that share a scale in FP8
REAL_BLOCK = (128, 128)  # of published checkpoints, and the only one of vLLM's kernel for CPUs
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
NIBBLES = torch.arange(8, dtype=torch.int32) * 4
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # of the 8 columns in one int32
# The magnitudes of E2M1, by their codes.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

Tensors = dict[str, Tensor]


def _fp8_block(weight: Tensor, name: str, block: tuple[int, int] = BLOCK) -> Tensors:
    """DeepSeek's and Qwen's FP8: one scale for each block, by which a code is multiplied."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows // block[0], block[0], columns // block[1], block[1])
    scale = blocks.abs().amax((1, 3)) / FP8_MAX
    codes = (blocks / scale[:, None, :, None]).to(FP8).reshape(rows, columns)
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scale}


def _fp8_tensor(weight: Tensor, name: str, scale: Tensor | None = None) -> Tensors:
    """One scale for the weight, one for its input."""
    scale = weight.abs().amax() / FP8_MAX if scale is None else scale
    given = torch.tensor(16 / FP8_MAX)  # of inputs up to 16
    return {f"{name}.weight": (weight / scale).to(FP8), f"{name}.weight_scale": scale, f"{name}.input_scale": given}


def _fp8_shared(weight: Tensor, name: str) -> Tensors:
    """Model-Optimizer's: projections that engines join, here all of them, have one scale; of weights up to 4."""
    return _fp8_tensor(weight, name, torch.tensor(4 / FP8_MAX))


def _fp8_channel(weight: Tensor, name: str) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / FP8_MAX
    return {f"{name}.weight": (weight / scale).to(FP8), f"{name}.weight_scale": scale}


def _int8_channel(weight: Tensor, name: str) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {f"{name}.weight": (weight / scale).round().to(torch.int8), f"{name}.weight_scale": scale}


def _groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes from -8 to 7 [out, in] int32, and their scales [out, in / GROUP]."""
    groups = weight.reshape(len(weight), -1, GROUP)
    scale = groups.abs().amax(2) / 7
    return (groups / scale[:, :, None]).round().int().reshape(weight.shape), scale


def _int4_pack(weight: Tensor, name: str) -> Tensors:
    codes, scale = _groups(weight)
    return {
        f"{name}.weight_packed": pack_to_int32(codes.to(torch.int8), 4),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": torch.tensor(weight.shape),
    }


def _gptq(weight: Tensor, name: str) -> Tensors:
    """Eight inputs in one int32; a zero point is stored as one less."""
    codes, scale = _groups(weight)
    rows, columns = weight.shape
    packed = ((codes.T + 8).reshape(columns // 8, 8, rows) << NIBBLES[:, None]).sum(1, dtype=torch.int32)
    zeros = torch.full((columns // GROUP, rows // 8), 0x77777777, dtype=torch.int32)
    return {
        f"{name}.qweight": packed,
        f"{name}.qzeros": zeros,
        f"{name}.scales": scale.T.half(),
        f"{name}.g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
    }


def _awq(weight: Tensor, name: str) -> Tensors:
    """Eight outputs in one int32, the even ones first; codes with a zero point in each group."""
    groups = weight.T.reshape(-1, GROUP, len(weight))  # [in / GROUP, GROUP, out]
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scale = (high - low) / 15
    zero = (-low / scale).round().clamp(0, 15)
    codes = (groups / scale[:, None] + zero[:, None]).round().clamp(0, 15).reshape(-1, len(weight))

    def pack(values: Tensor) -> Tensor:
        columns = values.int().reshape(len(values), -1, 8)[:, :, AWQ_ORDER]
        return (columns << NIBBLES).sum(2, dtype=torch.int32)

    return {f"{name}.qweight": pack(codes), f"{name}.qzeros": pack(zero), f"{name}.scales": scale.half()}


def _mxfp4(weight: Tensor, name: str) -> Tensors:
    """GPT-OSS's experts [E, in, out]: of each output 32 inputs share a power of two; two codes in one byte."""
    groups = weight.transpose(1, 2).reshape(len(weight), weight.shape[2], -1, 32)
    exponent = (groups.abs().amax(3) / 6).log2().ceil().clamp(-127, 127)
    values = groups / exponent.exp2()[..., None]
    codes = (values.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (values < 0)
    blocks = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": (exponent + 127).to(torch.uint8)}


def _fp8_real_block(weight: Tensor, name: str) -> Tensors:
    return _fp8_block(weight, name, REAL_BLOCK)


def _fp8_config(block: tuple[int, int]) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(block)}


def _compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """The configuration that llm-compressor writes."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _arguments(bits: int, kind: str, strategy: str, dynamic: bool = False, group: int | None = None) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": dynamic,
        "group_size": group,
    }


class Format(NamedTuple):
    """One format: what config.json says of it, and what replaces a weight."""

    config: dict[str, Any]
    tensors: Callable[[Tensor, str], Tensors]
    weights: tuple[str, ...] = ("_proj.weight",)  # the ends of the names of what is quantised
    dimensions: int = 2  # of such a weight


FORMATS: dict[str, Format] = {
    "fp8-block": Format(_fp8_config(BLOCK), _fp8_block),
    "fp8-block-128": Format(_fp8_config(REAL_BLOCK), _fp8_real_block),
    "fp8-tensor": Format({"quant_method": "fp8", "activation_scheme": "static"}, _fp8_tensor),
    "modelopt-fp8": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None, "ignore": ["lm_head"]},
        _fp8_shared,
    ),
    "w8a8-fp8": Format(
        _compressed(
            "float-quantized", _arguments(8, "float", "channel"), _arguments(8, "float", "token", dynamic=True)
        ),
        _fp8_channel,
    ),
    "w8a8-int8": Format(
        _compressed("int-quantized", _arguments(8, "int", "channel"), _arguments(8, "int", "token", dynamic=True)),
        _int8_channel,
    ),
    "w4a16": Format(_compressed("pack-quantized", _arguments(4, "int", "group", group=GROUP), None), _int4_pack),
    "gptq": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False},
        _gptq,
    ),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, _awq),
    "mxfp4": Format(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]},
        _mxfp4,
        ("experts.gate_up_proj", "experts.down_proj"),
        3,
    ),
}


def quantise(folder: Path, plain: Path, name: str, output: bool = False) -> Path:
    """Write the checkpoint in `plain` (a target's or a head's) to `folder` in one of FORMATS; output: GPTQ's lm_head
    too."""
    shutil.copytree(plain, folder)
    wanted, tensors = FORMATS[name], Tensors()
    for key, tensor in load_file(plain / "model.safetensors").items():
        if key.endswith(wanted.weights) and tensor.dim() == wanted.dimensions or output and key == "lm_head.weight":
            tensors |= wanted.tensors(tensor.float(), key.removesuffix(".weight"))
        else:
            tensors[key] = tensor
    stored = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = wanted.config | ({"lm_head": True} if output else {})
    write_config(folder, **read_config(plain) | {"quantization_config": config})
    return folder
