"""How a running server gets another draft head: a folder that both sides see has one request and its answer.

The head's files must be visible to the server anyway, and who may write into the folder may exchange the head: nothing
listens on a port for it. The worker looks for a request between two rounds.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.deploy_folder import ANSWER, FOLDER, REQUEST, SERVER, Served
from eagle_plugin.common.errors import UserError

LOOK_EVERY = 0.1  # seconds
SEVERAL_RANKS = "several ranks serve it together"

Exchange = Callable[[Path], None]  # puts the head of a folder in the place of the present one, or raises and keeps that


class MailboxError(UserError):
    """The folder of ``EAGLE_DEPLOY`` cannot be used."""


class HeadMailbox:
    """The worker's side; all calls are made by the thread that runs the rounds."""

    def __init__(
        self,
        folder: Path,
        served: Served,
        exchange: Exchange,
        logger: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        refuses: str = "",
    ) -> None:
        """Begin to look for requests.

        refuses: why no head can take the place of the served one, for the whole life of this server.

        Raises:
            MailboxError: the folder is not there, or others may write into it.
        """
        _check(folder)
        self._folder, self._server = folder, {**served._asdict(), "pid": os.getpid(), "refuses": refuses}
        self._exchange, self._logger, self._clock = exchange, logger, clock
        self._next = 0.0
        self._seen: int | None = None  # when the last request was written, in nanoseconds
        (folder / REQUEST).unlink(missing_ok=True)  # of a server before this one
        self._tell()

    def look(self) -> None:
        """Exchange the head if that was asked for; a few microseconds if not."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + LOOK_EVERY
        try:
            written = (self._folder / REQUEST).stat().st_mtime_ns
        except OSError:
            return
        if written != self._seen:
            self._seen = written
            self._serve()

    def _serve(self) -> None:
        try:
            request = json.loads((self._folder / REQUEST).read_text(encoding="utf-8"))
            number, head = str(request["id"]), Path(request["head"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._logger.warning("eagle-plugin: %s cannot be read (%s): the head stays", self._folder / REQUEST, error)
            return
        began, message = time.perf_counter(), ""
        try:
            if self._server["refuses"]:
                raise MailboxError(f"{self._server['refuses']}; start the server with {head} instead")
            self._exchange(head)
        except Exception as error:  # whatever is wrong with the files, the server goes on with the head that it has
            message = " ".join(str(error).split()) or type(error).__name__
        seconds = time.perf_counter() - began
        if message:
            self._logger.warning("eagle-plugin: the head stays, %s cannot take its place: %s", head, message)
        else:
            self._server["head"] = str(head)
            self._tell()
            self._logger.info("eagle-plugin: the draft head is now %s, exchanged in %.1f s", head, seconds)
        self._write(ANSWER, {"id": number, "head": str(head), "error": message, "seconds": round(seconds, 3)})

    def _tell(self) -> None:
        self._write(SERVER, self._server)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        """A full disk does not end the server: the command then has no answer, and says so."""
        try:
            write_output(self._folder / name, [json.dumps(content), "\n"])
        except UserError as error:
            self._logger.warning("eagle-plugin: %s", error)


def open_mailbox(
    served: Served, exchange: Exchange, logger: logging.Logger, *, rank: int = 0, ranks: int = 1, refuses: str = ""
) -> HeadMailbox | None:
    """The mailbox of the folder of ``EAGLE_DEPLOY``; None without one, and in all ranks but the first.

    Several ranks would have to exchange their parts before the same round: refused. refuses: another reason why no head
    can take the place of the served one.

    Raises:
        MailboxError: the folder is not there, or others may write into it.
    """
    named = os.environ.get(FOLDER, "")
    if not named or rank:
        return None
    return HeadMailbox(
        Path(named).absolute(), served, exchange, logger, refuses=refuses or (SEVERAL_RANKS if ranks > 1 else "")
    )


def check_folder() -> None:
    """Look at the folder of ``EAGLE_DEPLOY``, if there is one, before any weight is loaded; raises MailboxError."""
    if named := os.environ.get(FOLDER, ""):
        _check(Path(named).absolute())


def _check(folder: Path) -> None:
    try:
        found = folder.stat()
    except OSError as error:
        raise MailboxError(f"{FOLDER} is {folder}, which is not there ({error.strerror}); make the folder") from error
    if not stat.S_ISDIR(found.st_mode):
        raise MailboxError(f"{FOLDER} is {folder}, which is no folder; name one, or unset it")
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise MailboxError(f"{FOLDER} is {folder}, into which others may write; own it, and run: chmod 700 {folder}")
