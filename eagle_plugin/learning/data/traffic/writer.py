"""Reads exchanges from its input, filters private data, and writes what is left: a process beside the server.

Its output has one JSON object per line: first its version, or the sentence why it cannot start; then its counts. It
ends when its input ends, or the server does. Texts never go into its output, its errors or a log.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import IO

from eagle_plugin.common.errors import UserError
from eagle_plugin.common.installed import install_command
from eagle_plugin.learning.data.privacy.filter import PrivacyFilter, PrivacySettings
from eagle_plugin.learning.data.privacy.phones import PHONE_REGIONS, parse_regions
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.target_identity import NAME, target_digests
from eagle_plugin.learning.data.traffic.exchanges import records_of
from eagle_plugin.learning.data.traffic.segments import SegmentWriter
from eagle_plugin.traffic.detached import ServerProcess
from eagle_plugin.traffic.frames import Exchange, read_frame
from eagle_plugin.traffic.metrics import DROPPED
from eagle_plugin.traffic.served import ServedTarget
from eagle_plugin.traffic.settings import FOLDER, CaptureSettings
from eagle_plugin.traffic.writer_process import writer_settings
from eagle_plugin.traffic.writer_program import Run, run_writer

TELL_EVERY = 1.0  # seconds between two reports of counts
SILENCE = 5.0  # seconds


def main(arguments: list[str]) -> int:
    """Run until the input ends; with the argument `--check` only start."""
    return run_writer(arguments, _start)


def _start(is_check: bool) -> Run:
    settings = CaptureSettings.from_json(writer_settings())
    private, segments = _open(settings)
    if is_check:
        segments.discard_counts()

    def run(server: ServerProcess) -> None:
        _give_way()  # not before: the server waits until the packages are imported
        target = describe(settings.served) if settings.served else None
        TrafficWriter(private, segments, target).run(sys.stdin.buffer, server)

    return run


def _give_way() -> None:
    """Run only where a processor has nothing else to do: the threads of a CPU server wait for each other."""
    with contextlib.suppress(OSError):
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(19)


def _open(settings: CaptureSettings) -> tuple[PrivacyFilter, SegmentWriter]:
    """First what is quick to refuse: the recognisers take seconds to import."""
    regions = parse_regions(settings.phone_regions) if settings.phone_regions else PHONE_REGIONS
    try:
        segments = SegmentWriter(Path(settings.folder), settings.limit)
    except OSError as error:
        raise UserError(
            f"{settings.folder} cannot be written ({error.strerror or error}); set {FOLDER} to a folder of this user"
        ) from error
    try:
        filtering = PrivacySettings(settings.privacy, settings.recogniser, regions, settings.tokenizer)
        return PrivacyFilter(filtering), segments
    except UserError as error:
        segments.discard_counts()
        if isinstance(missing := error.__cause__, ImportError):
            raise UserError(
                f"the privacy filter needs the Python package {missing.name}, which {sys.executable} does not have; "
                f"run: {install_command('privacy')}; or set {FOLDER}_PYTHON to an interpreter that has it"
            ) from error
        raise


def describe(served: ServedTarget) -> dict[str, str]:
    """The name of the target, and the digests of its files if they are in a folder here."""
    try:
        digests = target_digests(served.folder, served.tokenizer, served.chat_template)
    except (DataError, OSError):  # a name that is not in the hub's cache, one file with everything
        reason = f"{served.folder} is no folder with a config.json that can be read"
        print(f"eagle-plugin: captured answers have the name of the target, and no digests: {reason}", file=sys.stderr)
        digests = {}
    return {NAME: served.name, **digests}


class TrafficWriter:
    """Filters and writes exchanges, and counts what becomes of them."""

    def __init__(self, private: PrivacyFilter, segments: SegmentWriter, target: dict[str, str] | None = None) -> None:
        """target: what `describe` gave, which every record says; None: unknown."""
        self._private, self._segments, self._target = private, segments, target
        self.counts: Counter[str] = Counter()  # names as in traffic/metrics.py
        self._exchanges = 0
        self._of_server: Counter[str] = Counter()
        self._told: Counter[str] | None = None
        self._told_at = 0.0
        self._reading_since: float | None = None

    def run(self, stream: IO[bytes], server: ServerProcess | None = None) -> None:
        """Write until the stream ends, or the server is gone; it sends counts every second.

        While nothing is received, this process has nothing to lose and may be ended.
        """
        if server is not None:
            threading.Thread(target=self._end_with, args=(server,), daemon=True).start()
        while True:
            self._reading_since = time.monotonic()
            frame = read_frame(stream)
            self._reading_since = None
            if frame is None:
                break
            if isinstance(frame, Exchange):
                self.write(frame)
            else:
                self._of_server = Counter(frame)
            if time.monotonic() - self._told_at >= TELL_EVERY:
                self._tell()
        self._tell()
        self._segments.close()

    def _end_with(self, server: ServerProcess) -> None:
        """A fork of the server may hold the pipe open, so that its end does not come."""
        while True:
            time.sleep(TELL_EVERY)
            since = self._reading_since
            if server.is_gone and since is not None and time.monotonic() - since > SILENCE:
                os._exit(0)

    def write(self, exchange: Exchange) -> None:
        """Filter one exchange and append its records."""
        self._exchanges += 1
        try:
            for outcome in records_of(exchange, self._private, self._target):
                self.counts["filtered"] += bool(outcome.found)
                if outcome.dropped:
                    self.counts[DROPPED + outcome.dropped] += 1
                if outcome.line is not None and not self._segments.holds(outcome.line):
                    self.counts[DROPPED + "too_large"] += 1
                elif outcome.line is not None:
                    self._segments.append(outcome.line)
                    self.counts["records"] += 1
                    self.counts["bytes"] += len(outcome.line)
        except OSError as error:
            if not self.counts[DROPPED + "write_error"]:
                print(f"eagle-plugin: a captured answer cannot be written: {error.strerror or error}", file=sys.stderr)
            self.counts[DROPPED + "write_error"] += 1
        except Exception as error:  # of a recogniser of the user, for instance; its message may hold text
            self.counts[DROPPED + "failed"] += 1
            print(f"eagle-plugin: a captured answer was dropped: {type(error).__name__}", file=sys.stderr)
        self.counts["removed_segments"] = self._segments.removed

    def _tell(self) -> None:
        self._told_at = time.monotonic()
        both = self.counts + self._of_server
        if both == self._told:
            return
        self._told = both
        with contextlib.suppress(OSError):  # a full disk, a server that is gone
            self._segments.write_counts(both)
            print(json.dumps(self.counts | {"exchanges": self._exchanges}), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
