"""How the command ends: one exit code and one message, whatever was raised, also for Ctrl-C while modules load."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from eagle_plugin.common.errors import UserError
from eagle_plugin.common.url_credentials import without_credentials

REFUSED, INTERRUPTED = 2, 128 + signal.SIGINT
STOPPED = "stopped by Ctrl-C"
_owns_process = False  # whether the command is all that this process runs


def end_of(command: Callable[[], int], owns_process: bool) -> int:
    """Run the command and return its exit code, or print what it raised as one line and return 2, or 130 after Ctrl-C.

    Other errors than UserError, OSError and KeyboardInterrupt are defects of this project and keep their traceback.

    Args:
        owns_process: the process ends after the command; else it is called inside a program, such as a test.
    """
    global _owns_process
    _owns_process = owns_process
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # what cannot be printed is an error now, not a message when Python ends
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:  # of a file for which the command has no better sentence, or of the output
        if owns_process:
            _drop_output()
        if isinstance(error, BrokenPipeError):  # `eagle-plugin ... | head`
            return 128 + signal.SIGPIPE
        print(f"error: {_describe(error)}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return INTERRUPTED


def _describe(error: OSError) -> str:
    what = without_credentials(str(error.filename or "")) or "the standard output, a file or a connection"
    return f"{what} cannot be used ({error.strerror or error}); check that it is there, its rights and its disk"


def _drop_output() -> None:
    """Let what Python still wants to print when it ends go nowhere: it would fail a second time."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def importing() -> Iterator[None]:
    """End the process at once if Ctrl-C comes while the block imports; nothing has been started or written by then.

    Python raises KeyboardInterrupt inside whatever runs. Inside the C++ of torch, or inside a callback of the import
    system, it becomes another error, or a traceback on stderr and no error at all.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if not (_owns_process and main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
        yield
        return

    def leave(number: int, frame: object) -> NoReturn:
        os.write(2, f"{STOPPED}\n".encode())
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Within this block SIGTERM raises SystemExit, so that a command that is ended stops its servers."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
