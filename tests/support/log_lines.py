"""The messages of a logger that keeps itself from the root, where pytest listens."""

from __future__ import annotations

import logging


class Lines(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.logged.append(record.getMessage())
