"""A running server whose head is exchanged: what it serves, the request, and its answer."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from eagle_plugin.atomic_io import write_output
from eagle_plugin.errors import UserError

FOLDER = "EAGLE_DEPLOY"
SERVER, REQUEST, ANSWER = "server.json", "request.json", "answer.json"
ANSWER_SECONDS = 300.0  # the longest that loading a head may take


class DeployError(UserError):
    """The head of the server was not exchanged."""


class ServedHead:
    """The client's side of `engines.head_mailbox`."""

    def __init__(self, folder: Path, url: str) -> None:
        """url: of the server's HTTP endpoint. Raises DeployError where no server uses the folder."""
        self._folder, self._url = folder, url.rstrip("/").removesuffix("/v1")
        self.read()

    def read(self) -> dict[str, Any]:
        """What the server serves: engine, target, head, algorithm, pid."""
        try:
            found = json.loads((self._folder / SERVER).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DeployError(
                f"{self._folder / SERVER} cannot be read ({error}); start the server with {FOLDER}={self._folder}, "
                "and give the same folder here"
            ) from error
        if not isinstance(found, dict):
            raise DeployError(f"{self._folder / SERVER} is not of a server; name the server's {FOLDER}")
        return found

    def exchange(self, head: Path, waiting: Callable[[float], None] = lambda seconds: None) -> float:
        """Let the server load a head and serve it; returns the seconds that its rounds waited.

        waiting: called with the seconds since the begin.

        Raises:
            DeployError: the server refused it, with its reason, or did not answer.
        """
        number, began = uuid.uuid4().hex, time.monotonic()
        (self._folder / ANSWER).unlink(missing_ok=True)
        write_output(self._folder / REQUEST, [json.dumps({"id": number, "head": str(head.absolute())}), "\n"])
        while (answer := self._answer(number)) is None:
            waited = time.monotonic() - began
            if waited > ANSWER_SECONDS:
                raise DeployError(f"the server at {self._url} did not take the head in {waited:.0f} s; see its log")
            waiting(waited)
            self._wake()
        if answer["error"]:
            raise DeployError(f"the server keeps its head: {answer['error']}")
        return float(answer["seconds"])

    def _answer(self, number: str) -> dict[str, Any] | None:
        try:
            found = json.loads((self._folder / ANSWER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.get("id") == number else None

    def _wake(self) -> None:
        """Ask for two tokens: the server looks for a request between two rounds, and without traffic it has none."""
        body = {"model": "default", "prompt": "Hello", "max_tokens": 3, "temperature": 0}
        try:
            models = httpx.get(f"{self._url}/v1/models", timeout=15, trust_env=False).raise_for_status().json()
            body["model"] = models["data"][0]["id"]
            httpx.post(f"{self._url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL, KeyError, IndexError, ValueError) as error:
            raise DeployError(f"{self._url} does not answer ({error}); give the URL of the server") from error
