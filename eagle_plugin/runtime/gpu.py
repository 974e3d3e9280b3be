"""On which GPUs a worker of ours may serve, as a function of what was found there."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from eagle_plugin.common.errors import first_line
from eagle_plugin.kernels import attention, build, loader

CAPABILITY = (8, 0)  # the oldest that the CUDA sources and the Triton tiles are made for
MAX_HEAD_DIM = 256  # of our attention kernels
CAPABILITY_E4M3 = (8, 9)  # the oldest for which Triton reads float8_e4m3fn


class Gpu(NamedTuple):
    """What our kernels need of a GPU and its software."""

    name: str
    capability: tuple[int, int]
    is_nvidia: bool
    has_triton: bool
    missing_library: str  # why there is no native library for CUDA tensors; "" where there is one

    @classmethod
    def current(cls) -> Gpu:
        """The current CUDA device. Builds the native library at its first use."""
        return cls(
            torch.cuda.get_device_name(),
            torch.cuda.get_device_capability(),
            torch.version.hip is None,
            attention._triton() is not None,
            _missing_library(),
        )


def unsupported_gpu(gpu: Gpu, head_dims: Sequence[int], caches: Sequence[str] = ()) -> list[str]:
    """Why our worker does not serve on this GPU models with heads of these dimensions; empty when it does.

    caches: the dtypes of their KV caches.
    """
    if not gpu.is_nvidia:
        return [f"device {gpu.name}: only NVIDIA GPUs are served"]
    reasons = []
    if gpu.capability < CAPABILITY:
        found, wanted = (".".join(map(str, x)) for x in (gpu.capability, CAPABILITY))
        reasons.append(f"device {gpu.name}: compute capability {found}, at least {wanted} is served")
    elif gpu.capability < CAPABILITY_E4M3 and "float8_e4m3fn" in caches:
        found, wanted = (".".join(map(str, x)) for x in (gpu.capability, CAPABILITY_E4M3))
        reasons.append(
            f"device {gpu.name}: compute capability {found} has no KV caches of float8_e4m3fn, {wanted} has; "
            "--kv-cache-dtype fp8_e5m2 is served"
        )
    if not gpu.has_triton:
        reasons.append("Triton is not installed or is switched off by EAGLE_KERNELS=torch: tree attention needs it")
    if gpu.missing_library:
        reasons.append(f"native library for CUDA: {gpu.missing_library}")
    if gpu.capability >= CAPABILITY and max(head_dims) > MAX_HEAD_DIM:
        reasons.append(f"head_dim {max(head_dims)}: at most {MAX_HEAD_DIM} is served on a GPU")
    return reasons


def may_serve_here(head_dims: Sequence[int], caches: Sequence[str]) -> bool:
    """Whether `unsupported_gpu` is to be expected to have no reason on the current CUDA device.

    Nothing is built or allocated.
    """
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    has_library = loader.kernel_library("cuda").shipped() is not None or build.find_nvcc() is not None
    is_on = os.environ.get("EAGLE_KERNELS") != "torch" and importlib.util.find_spec("triton") is not None
    missing = "" if has_library else "no nvcc"
    return not unsupported_gpu(Gpu("", torch.cuda.get_device_capability(), True, is_on, missing), head_dims, caches)


def _missing_library() -> str:
    try:
        module = loader.load("cuda")
    except (RuntimeError, OSError, ValueError) as error:
        return first_line(error)
    return "" if module is not None else "there is none for this GPU, and none could be built (the log says why)"
