"""The memory of this machine: what is free, what a server needs, and whether a process ended for lack of it."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import psutil

from eagle_plugin.bench.spec import ServerSpec

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # as Python and as a shell give it
# What the engines, torch, the C++ library and Python print. SGLang and vLLM end with another code than -9 when one of
# their processes was killed, and name its code.
LACK = re.compile(
    r"exit code: -9\b|Failed core proc\(s\): \{.*: -9\b|\bMemoryError\b|std::bad_alloc|[Cc]annot allocate memory|"
    r"can't allocate memory|DefaultCPUAllocator: not enough memory|CUDA out of memory"
)
# SGLang's server ends itself by SIGKILL when one of its processes raised an exception, which is in the log.
RAISED = " hit an exception: "
CGROUP = Path("/sys/fs/cgroup")
GIB = 2**30


def lacked_memory(code: int | None, log: str) -> bool:
    """Whether a process that ended with this code, and printed this, ended for lack of memory.

    The system kills a process when memory runs out. Who else sends SIGKILL to it cannot be told apart.
    """
    return (code in KILLED and RAISED not in log) or LACK.search(log) is not None


def available_bytes() -> int:
    """Memory that new processes can have, in the limit of this container where it has one (cgroup v2)."""
    free = psutil.virtual_memory().available
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(free, max(0, int(limit) - int(used)))
    except (OSError, ValueError):  # no container, or no limit ("max")
        return free


def least_bytes(spec: ServerSpec) -> int:
    """What a server on a CPU needs at the least: the files of both models, and the cache. 0 on a GPU or if unknown."""
    if spec.device != "cpu":
        return 0
    try:
        config = json.loads((spec.target / "config.json").read_text(encoding="utf-8"))
        heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
        width = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        numbers = 2 * int(config["num_hidden_layers"]) * heads * width  # of keys and values per token
        folders = [spec.target, *([spec.head] if spec.head else [])]
        weights = sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return 0  # the engine says what is wrong with the files
    return weights + spec.max_total_tokens * numbers * (4 if spec.dtype == "float32" else 2)


def enough_to_try_again(available: int, needed: int = 0) -> int:
    """Bytes that should be free before a process that lacked memory runs again.

    available: bytes that were free when it began, which other programs may have taken since. needed: at the least.
    """
    return max(needed, int(0.95 * available))


def gib(count: int) -> str:
    """A number of bytes, for a message."""
    return f"{count / GIB:.1f} GiB"
