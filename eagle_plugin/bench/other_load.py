"""How much of the machine processes that are no part of a measurement used while it ran."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def machine_seconds() -> float:
    """Processor time of all processes and the kernel since the machine started."""
    times = psutil.cpu_times()
    fields = ("user", "nice", "system", "irq", "softirq")  # user has the time of guests already
    return sum(getattr(times, field, 0.0) for field in fields)


class OtherLoad:
    """Counts from its creation: the processor time of the machine without that of one server and of this process.

    Args:
        server_seconds: gives the processor time of the server's processes until now.
        machine: gives the processor time of everything until now.
        own: gives the processor time of this process until now.
        clock: gives the time in seconds.
    """

    def __init__(
        self,
        server_seconds: Callable[[], float],
        machine: Callable[[], float] = machine_seconds,
        own: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._readers = (machine, server_seconds, own, clock)
        self._before = [read() for read in self._readers]

    def share(self, cores: int | None = None) -> float:
        """The part of `cores` (default: all of the machine) that others have used, 0 to 1."""
        cores = cores or psutil.cpu_count() or 1
        machine, server, own, seconds = (
            read() - before for read, before in zip(self._readers, self._before, strict=True)
        )
        if seconds <= 0:
            return 0.0
        return min(1.0, max(0.0, (machine - server - own) / (seconds * cores)))
