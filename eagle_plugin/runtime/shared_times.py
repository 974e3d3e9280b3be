"""Gives the ranks that choose alike the times of rounds that rank 0 has measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.chooser import MOST_UNLEARNED
from eagle_plugin.policy.served_rounds import ServedRound, TimedRound

COLUMNS = 6  # steps, topk, width, requests, tokens of their prefixes, seconds


class SharedTimes:
    """One broadcast of 1.5 kB between the hosts, in one of some 8 rounds; the same rows in every rank."""

    def __init__(self, group: Any) -> None:
        """group: the engine's group of these ranks; ``rank_in_group`` and ``cpu_group`` are used."""
        self._group = group
        self._sent = torch.zeros(MOST_UNLEARNED + 1, COLUMNS, dtype=torch.float64)
        self._rows = self._sent.numpy()  # the same memory; the first row has their number

    def __call__(self, times: Sequence[TimedRound]) -> list[TimedRound]:
        """The times of rank 0, at most `MOST_UNLEARNED`; to be called by all ranks. It waits for the host of rank 0."""
        if self._group.rank_in_group == 0:
            self._rows[0, 0] = len(times)
            for row, (served, seconds) in zip(self._rows[1:], times, strict=False):
                row[:] = *served.shape, served.b, served.prefix_tokens, seconds
        distributed.broadcast(self._sent, group=self._group.cpu_group, group_src=0)
        found = self._rows[1 : 1 + int(self._rows[0, 0])].tolist()
        return [(ServedRound(Shape(*map(int, row[:3])), int(row[3]), int(row[4])), row[5]) for row in found]
