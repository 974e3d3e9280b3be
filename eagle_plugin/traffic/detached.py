"""Makes a writer no descendant of its server: engines kill all of their descendants at once when they shut down.

So the writer goes on until its input has ended, and has written all of it. It also looks whether the server is there: a
fork of the server may hold the pipe open.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from functools import partial

SERVER = "_EAGLE_WRITER_SERVER"  # in the environment of a writer: the process id of its server
_READY = b"1"


def detach() -> Callable[[], None]:
    """Go on in a child; returns what it calls when it can no longer refuse to start.

    Only then this process ends, and the child has no server above it. Before that this process ends as the child does,
    so that the server learns its exit code. To be called before there is another thread.
    """
    reading, writing = os.pipe()
    above = os.getpid()
    child = os.fork()
    if not child:
        os.close(reading)
        return partial(_leave, writing, above)
    os.close(writing)
    if os.read(reading, 1) == _READY:
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _leave(writing: int, above: int) -> None:
    os.write(writing, _READY)
    os.close(writing)
    while os.getppid() == above:
        time.sleep(0.001)


class ServerProcess:
    """The server of this writer."""

    def __init__(self, pid: int | None = None) -> None:
        """pid: None for what the environment says."""
        self._pid = int(os.environ[SERVER]) if pid is None else pid
        self._file: int | None = None
        self._was_gone = False
        try:
            self._file = os.pidfd_open(self._pid)
        except ProcessLookupError:
            self._was_gone = True
        except (AttributeError, OSError):  # not Linux, or a sandbox that does not let us
            self._file = None

    @property
    def is_gone(self) -> bool:
        """Whether it has ended."""
        if self._was_gone:
            return True
        if self._file is not None:
            return bool(select.select([self._file], [], [], 0)[0])
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # another one has its number now
            return True
        return False
