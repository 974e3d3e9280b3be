"""Step `environment`: what the results of the other steps depend on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.steps import Setting
from eagle_plugin.kernels.build import find_nvcc

ROOT = Path(__file__).resolve().parents[2]
# What a result depends on, by folder.
SOURCES = {"eagle_plugin": "*.py", "csrc": "*", "benchmarks": "*.py", "tests/kernels": "*.py"}
DISTRIBUTIONS = ("torch", "triton", "apache-tvm-ffi", "sglang", "vllm", "flashinfer-python", "transformers")


def run(setting: Setting) -> dict[str, Any]:
    """Describe the machine, without names or paths that identify it."""
    about: dict[str, Any] = identity(setting) | {
        "python": platform.python_version(),
        "system": platform.platform(),
        "compute_sanitizer": shutil.which("compute-sanitizer") is not None,
        "versions": versions(DISTRIBUTIONS),
    }
    if setting.on_gpu:
        properties = torch.cuda.get_device_properties(setting.device)
        about |= {
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "gpus": torch.cuda.device_count(),
        }
    return about


def identity(setting: Setting) -> dict[str, str]:
    """What must be the same for a finished step to count: plugin, device and versions."""
    found = versions(("triton", "eagle-plugin"))
    return {
        "device": torch.cuda.get_device_name(setting.device) if setting.on_gpu else platform.machine(),
        "size": "tiny" if setting.tiny else "short" if setting.short else "full",
        "driver": driver() if setting.on_gpu else "none",
        "torch": torch.__version__,
        "triton": found.get("triton", "none"),
        "nvcc": nvcc_version(),
        "plugin": found.get("eagle-plugin", "a checkout"),
        "sources": digest(ROOT),
    }


def engine_version(engine: str | None, folders: Sequence[str] = ()) -> dict[str, str]:
    """What must be the same beside `identity` for a step of an engine; empty for a step without one.

    folders: where the engine is looked for before the places of this interpreter.
    """
    if engine is None:
        return {}
    found = versions((engine, f"{engine}-cpu"), folders)
    return {engine: next(iter(found.values()), "none")}


def versions(names: tuple[str, ...], folders: Sequence[str] = ()) -> dict[str, str]:
    """The versions of those distributions that are installed."""
    places = [*folders, *sys.path]
    found = {}
    for name in names:
        for distribution in importlib.metadata.distributions(name=name, path=places):
            found[name] = distribution.version
            break
    return found


def digest(root: Path) -> str:
    """A digest of the sources of a checkout that a result may depend on."""
    seen = hashlib.sha256()
    for folder, pattern in SOURCES.items():
        for path in sorted((root / folder).rglob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                seen.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return seen.hexdigest()[:16]


def driver() -> str:
    """The version of the NVIDIA driver."""
    return _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or "unknown"


def nvcc_version() -> str:
    """The last line of `nvcc --version`, which names the build; "none" without nvcc."""
    nvcc = find_nvcc()
    return (_first_line([nvcc, "--version"], last=True) if nvcc else None) or "none"


def _first_line(command: list[str], last: bool = False) -> str | None:
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return lines[-1 if last else 0].strip() if lines else None
