"""Ends a process group whose starter was killed: a SIGKILL leaves no time to stop the servers that one has started."""

from __future__ import annotations

import os
import subprocess

# Reads until the other end of the pipe is closed, which the kernel does whatever ends the starter. A paused process
# handles SIGTERM only after SIGCONT.
_SCRIPT = """read -r line
kill -CONT "-$1"; kill -TERM "-$1"
for second in 1 2 3 4 5 6 7 8 9 10; do kill -0 "-$1" || exit; sleep 1; done
kill -KILL "-$1\""""


class Guard:
    """Ends a process group if this process ends before `dismiss` is called."""

    def __init__(self, group: int) -> None:
        reading, self._writing = os.pipe()
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "guard", str(group)],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # what ends this process's group must not end the guard
            )
        finally:
            os.close(reading)

    def dismiss(self) -> None:
        """Let the group live, or be gone, whatever happens to this process."""
        self._process.kill()
        self._process.wait()
        os.close(self._writing)
