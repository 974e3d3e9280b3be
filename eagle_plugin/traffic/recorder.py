"""The queue before the writer of the capture, which filters private data: that is slow, and has the least priority."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

from eagle_plugin.traffic import writer_process
from eagle_plugin.traffic.settings import FOLDER, CaptureError, CaptureSettings
from eagle_plugin.traffic.writer_process import WriterKind, WriterProcess

QUEUE_BYTES = 64 << 20
LONGEST = 16 << 20  # bytes of one exchange
# The writer is a program of its own: servers import nothing of `learning`.
WRITER = "eagle_plugin.learning.data.traffic.writer"


def check_writer(settings: CaptureSettings) -> None:
    """Start the writer for a moment: is the filter installed, can the folder be written?

    Raises:
        CaptureError: with the writer's sentence.
    """
    writer_process.check_writer(_kind(settings))


class Recorder(WriterProcess):
    """The writer process of one server process, and the queue before it.

    Raises:
        CaptureError: the writer does not start.
    """

    def __init__(
        self,
        settings: CaptureSettings,
        show: Callable[[Counter[str]], None] = lambda totals: None,
        command: list[str] | None = None,
    ) -> None:
        """show as of `WriterProcess`; command is for tests."""
        super().__init__(_kind(settings, command), show)


def _kind(settings: CaptureSettings, command: list[str] | None = None) -> WriterKind:
    command = command or [settings.python or sys.executable, "-m", WRITER]
    return WriterKind("capture", FOLDER, CaptureError, command, settings.to_json(), QUEUE_BYTES, LONGEST)
