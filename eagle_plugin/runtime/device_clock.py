"""Times what runs on a device: by events on a GPU, for which nobody waits, else by the host's clock."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from eagle_plugin.policy.round_times import Clock, HostClock


class EventClock:
    """Moments of the stream on which the rounds of a GPU run: the host launches them before the GPU gets there.

    A mark is an event on the current stream. It is made between graphs, never in a capture, and costs the host some
    microseconds; what it tells is read when the GPU has passed it.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._event = partial(torch.get_device_module(device).Event, enable_timing=True)

    def mark(self) -> Any:
        """As `Clock.mark`."""
        event = self._event()
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float | None:
        """As `Clock.seconds`, of two marks on one stream."""
        return begin.elapsed_time(end) / 1e3 if end.query() and begin.query() else None


def clock_of(device: torch.device | str) -> Clock:
    """The clock of rounds that run on this device."""
    return HostClock() if torch.device(device).type == "cpu" else EventClock(device)
