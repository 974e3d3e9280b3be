"""What the processes of a server's group are, and what they take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

import psutil


def members_of(group: int) -> list[int]:
    """The ids of the processes of this process group that still run (zombies are left out)."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            is_member = os.getpgid(process.pid) == group
        except OSError:
            continue
        if is_member and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def cpu_clock_of(pids: Sequence[int]) -> Callable[[], float]:
    """A function that gives the processor time of these processes together, in seconds.

    To find them takes longer than to read their times, so they are found once.
    """
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))

    def read() -> float:
        total = 0.0
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    return read


def memory_bytes_of(pids: Sequence[int]) -> int:
    """Memory of these processes; what they share counts once (Linux's PSS, elsewhere the resident size)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            found = psutil.Process(pid).memory_full_info()
            total += getattr(found, "pss", found.rss)
    return total
