"""The machine of a measurement, without names or paths that identify it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from eagle_plugin.common.devices import usable_cores

BUSY_SECONDS = 2.0  # over which it is told how busy a machine is


class Machine(BaseModel):
    """Processor, cores that this process may use, memory, and the instruction sets that matter for bf16."""

    model_config = ConfigDict(extra="forbid")

    cpu: str
    cores: int
    memory_gib: float
    instruction_sets: list[str]
    system: str
    python: str


def busy_percent() -> float:
    """How busy the machine is now, in percent of all cores.

    OpenMP threads that wait for each other keep their cores busy. With one thread per core, one other busy process can
    make a server ten times slower, so a comparison is valid only if this is near 0 before it starts.
    """
    return psutil.cpu_percent(interval=BUSY_SECONDS)


def describe_machine() -> Machine:
    """Read the description of this machine from the operating system."""
    cpuinfo = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    return Machine(
        cpu=fields.get("model name") or platform.processor() or platform.machine(),
        cores=usable_cores(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        instruction_sets=[name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags],
        system=platform.system(),
        python=platform.python_version(),
    )


def installed_versions(names: Sequence[str]) -> dict[str, str]:
    """The versions of those distributions that are installed in this environment."""
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
