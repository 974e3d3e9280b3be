"""The queue before the writer of a feature store, and the frames that it sends: one document each."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.collect.settings import STORE, CollectError, CollectSettings
from eagle_plugin.traffic.frames import Exchange
from eagle_plugin.traffic.writer_process import WriterKind, WriterProcess

# The writer is a program of its own: servers import nothing of `learning`.
WRITER = "eagle_plugin.learning.data.collecting.writer"
LONGEST = (1 << 32) - 1  # bytes of one document: what a frame can say


class Collected(NamedTuple):
    """One request whose states were seen from its first token on."""

    id: str
    source: str
    split: str
    ids: list[int]  # all tokens, the last one of the answer included
    prompt: int  # tokens before the answer
    given: bool  # whether the answer came with the prompt, and was not generated here
    states: Tensor  # [n, W] bfloat16, n <= len(ids): aux states and last states side by side, on the host

    def frame(self) -> Exchange:
        """The document as it is sent."""
        facts = self._asdict() | {"states": list(self.states.shape)}
        data = self.states.contiguous().view(torch.uint8).numpy().tobytes()
        return Exchange(time.time(), json.dumps(facts).encode(), data)

    @classmethod
    def of(cls, frame: Exchange) -> Collected:
        """What `frame` made."""
        facts = json.loads(frame.request)
        states = torch.frombuffer(bytearray(frame.answer), dtype=torch.bfloat16).view(facts["states"])
        return cls(**facts | {"states": states})


class FeatureRecorder(WriterProcess):
    """The writer process of one worker.

    Raises:
        CollectError: it does not start, or the store is of another target.
    """

    def __init__(self, settings: CollectSettings, show: Callable[[Counter[str]], None] = lambda totals: None) -> None:
        """show as of `WriterProcess`."""
        super().__init__(writer_kind(settings), show)


def writer_kind(settings: CollectSettings) -> WriterKind:
    """The writer of a store."""
    command, given = [settings.python or sys.executable, "-m", WRITER], settings.to_json()
    return WriterKind("collection of features", STORE, CollectError, command, given, settings.queue_mib << 20, LONGEST)
