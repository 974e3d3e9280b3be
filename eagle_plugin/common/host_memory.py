"""The memory that this machine, or this container, has."""

from __future__ import annotations

import os
from pathlib import Path

LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int:
    """All of it, in the limit of this container where it has one (cgroup v2).

    Not what is free: several processes of a server must find the same number, also while they load a model.
    """
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(whole, int(LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or no limit ("max")
        return whole
