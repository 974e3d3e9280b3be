"""Devices: the one that a user names with --device, and what tells one kind of device from another."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eagle_plugin.common.errors import UserError, first_line

if TYPE_CHECKING:
    import torch

_DRIVER = Path("/proc/driver/nvidia/version")
_CPUINFO = Path("/proc/cpuinfo")


class DeviceError(UserError):
    """A device that is not there."""


def check_device(name: str) -> str:
    """The name itself, if torch can put a tensor there: cpu, cuda, cuda:N.

    Raises:
        DeviceError: torch does not know the device, or this machine does not have it.
    """
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = first_line(error).rstrip(".")
        count = torch.cuda.device_count()
        there = f"one of cuda:0 to cuda:{count - 1}, or cpu" if count else "cpu: this torch finds no GPU here"
        raise DeviceError(f"--device {name} cannot be used ({reason}); give {there}") from error
    return name


def default_device() -> Literal["cpu", "cuda"]:
    """Where a command computes or serves that was given no device: a GPU if torch sees one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def fast_dtype(device: str | torch.device | None = None) -> Literal["bfloat16", "float32"]:
    """The dtype for computing on a device: bfloat16, or float32 on a CPU for which torch has no bfloat16 product.

    There, with AVX2 alone, torch multiplies bfloat16 row by row, and float32 is several times as fast. None: a GPU
    if there is one.
    """
    import torch

    if device is None:
        device = default_device()
    is_cpu = torch.device(device).type == "cpu"
    return "float32" if is_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported() else "bfloat16"


def gpu_generation() -> int | None:
    """The first number of the compute capability of the GPU that torch would use; None without one."""
    import torch

    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None


def device_key(device: torch.device) -> dict[str, str]:
    """The kind of a device and its driver: what was found on one holds for every other with the same key."""
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"{properties.major}.{properties.minor}"
        return {"device": f"{properties.name} ({capability})", "driver": driver_version()}
    return {"device": f"{device.type} ({platform.machine()}, {_processor()})", "driver": platform.release()}


def driver_version() -> str:
    """The version of NVIDIA's driver as the system names it, else the CUDA version that it supports, else "unknown"."""
    try:
        return _DRIVER.read_text(encoding="utf-8").splitlines()[0].strip()
    except (OSError, IndexError, UnicodeDecodeError):
        version = ctypes.c_int()
        try:
            failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        except (OSError, AttributeError):
            return "unknown"
        return "unknown" if failed else f"CUDA {version.value}"


@functools.cache
def _processor() -> str:
    """The name, and family and model: hypervisors give processors with other instructions the same name."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    if "model name" not in fields:
        return platform.processor()
    return " ".join([fields["model name"], *(fields[name] for name in ("cpu family", "model") if name in fields)])


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
