"""A running server whose head is exchanged: what it serves, the request, and its answer."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from filelock import FileLock, Timeout

from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.deploy_folder import ANSWER, FOLDER, REQUEST, SERVER, Served
from eagle_plugin.common.errors import UserError
from eagle_plugin.common.http_access import describe_refusal, request_options
from eagle_plugin.common.json_files import kept_object, read_object

LOCK = ".deploy.lock"
KEYS = (*Served._fields, "refuses")  # of SERVER
ANSWER_SECONDS = 300.0  # the longest that loading a head may take
WAKE_EVERY = 0.3  # seconds; longer than the time between two looks of a server
MOST_WAKES = 20  # a server that answered so many requests has looked
LATE_LOOKS = 4  # for the answer of a server that refused the request which should wake it, and was awake
OWNER = "run this as the user of the server"


class DeployError(UserError):
    """The head of the server was not exchanged."""


class ServedHead:
    """The client's side of `runtime.head_mailbox`."""

    def __init__(self, folder: Path, url: str) -> None:
        """url: of the server's HTTP endpoint. Raises DeployError where no server uses the folder."""
        self._folder, self._url = folder, url.rstrip("/").removesuffix("/v1")
        self.read()

    def read(self) -> dict[str, Any]:
        """What the server serves: `KEYS`; raises DeployError if it exchanges nothing."""
        fix = f"start the server with {FOLDER}={self._folder}, and give the same folder here"
        try:
            found = read_object(self._folder / SERVER, DeployError, fix)
        except FileNotFoundError as error:
            raise DeployError(f"{self._folder / SERVER} cannot be read (no such file); {fix}") from error
        if not all(isinstance(found.get(key), str) for key in KEYS):
            raise DeployError(
                f"{self._folder / SERVER} is not of a server, wanted {', '.join(KEYS)}; give the folder that a server "
                f"has as {FOLDER}"
            )
        if found["refuses"]:
            raise DeployError(f"the head cannot be exchanged: {found['refuses']}; start the server with the new head")
        return found

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within this block no other command exchanges the head of this server; raises DeployError if one does."""
        try:
            with FileLock(self._folder / LOCK, timeout=0):
                yield
        except Timeout as error:
            raise DeployError(f"another `eagle-plugin deploy` uses {self._folder}; wait for it, or stop it") from error
        except OSError as error:
            raise DeployError(f"{self._folder} cannot be written ({error.strerror}); {OWNER}") from error

    def exchange(self, head: Path, waiting: Callable[[float], None] = lambda seconds: None) -> float:
        """Let the server load a head and serve it; returns the seconds that its rounds waited.

        waiting: called with the seconds since the begin.

        Raises:
            DeployError: the server refused it, with its reason, or did not answer.
        """
        number, began = uuid.uuid4().hex, time.monotonic()
        try:
            (self._folder / ANSWER).unlink(missing_ok=True)
        except OSError as error:
            raise DeployError(f"{self._folder} cannot be written ({error.strerror}); {OWNER}") from error
        write_output(self._folder / REQUEST, [json.dumps({"id": number, "head": str(head.absolute())}), "\n"], OWNER)
        try:
            answer = self._wait(number, began, waiting)
        finally:
            (self._folder / REQUEST).unlink(missing_ok=True)  # no server shall find it later
        if answer["error"]:
            raise DeployError(f"the server keeps its head: {answer['error']}")
        return float(answer["seconds"])

    def _wait(self, number: str, began: float, waiting: Callable[[float], None]) -> dict[str, Any]:
        before = self.read()["head"]
        for _ in range(MOST_WAKES):
            try:
                self._wake()  # a request waits while a head is loaded
            except DeployError:  # such as a limit of requests; other traffic can have woken the server
                if (answer := self._late_answer(number, before, began)) is None:
                    raise
                return answer
            if (answer := self._answer(number)) is not None:
                return answer
            waiting(time.monotonic() - began)
            time.sleep(WAKE_EVERY)
        raise DeployError(
            f"the server at {self._url} answers requests and does not look into {self._folder}; give the URL and the "
            f"{FOLDER} of the same server, and see its log"
        )

    def _late_answer(self, number: str, before: str, began: float) -> dict[str, Any] | None:
        for _ in range(LATE_LOOKS):
            if (answer := self._answer(number)) is not None:
                return answer
            time.sleep(WAKE_EVERY)
        if self.read()["head"] != before:  # its answer could not be written, or read
            return {"error": "", "seconds": time.monotonic() - began}
        return None

    def _answer(self, number: str) -> dict[str, Any] | None:
        found = kept_object(self._folder / ANSWER)
        return found if found.get("id") == number else None

    def _wake(self) -> None:
        """Ask for three tokens: the server looks for a request between two rounds, and without traffic it has none."""
        body = {"model": "default", "prompt": "Hello", "max_tokens": 3, "temperature": 0}
        try:
            options = request_options()
            models = httpx.get(f"{self._url}/v1/models", timeout=15, **options).raise_for_status().json()
            body["model"] = models["data"][0]["id"]
            answer = httpx.post(f"{self._url}/v1/completions", json=body, timeout=ANSWER_SECONDS, **options)
            answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL, KeyError, IndexError, TypeError, ValueError) as error:
            raise DeployError(
                f"{self._url} does not answer ({describe_refusal(error)}); give the URL of the server"
            ) from error
