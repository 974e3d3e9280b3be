"""The program of a writer, apart from what it writes: how it starts, or says why not, and ends with its server."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence

import eagle_plugin
from eagle_plugin.common.errors import UserError
from eagle_plugin.traffic.detached import ServerProcess, detach

Run = Callable[[ServerProcess], None]


def run_writer(arguments: Sequence[str], start: Callable[[bool], Run]) -> int:
    """Run until the input ends; with the argument `--check` only start. Returns the exit code.

    Its output has one JSON object per line: first its version, or the sentence why it cannot start.

    start: makes ready what writes, and returns what runs it; told whether it is only a check; raises UserError.
    """
    is_check = "--check" in arguments
    leave = None if is_check else detach()
    server = ServerProcess()
    for number in (signal.SIGINT, signal.SIGTERM):  # of the server's group; what is queued is written first
        signal.signal(number, signal.SIG_IGN)
    try:
        run = start(is_check)
    except UserError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 2
    if leave is not None:
        leave()
    print(json.dumps({"version": eagle_plugin.__version__}), flush=True)
    if leave is not None:
        run(server)
    return 0
