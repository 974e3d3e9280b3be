"""ASGI middleware of both engines' servers: copies a request and its answer on their way, and changes neither."""

from __future__ import annotations

import asyncio
import atexit
import logging
import random
import re
import time
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from eagle_plugin.common.asgi import Message, Receive, Send, route_of
from eagle_plugin.traffic.accepted_drafts import ACCEPTED_DRAFTS
from eagle_plugin.traffic.frames import Exchange
from eagle_plugin.traffic.metrics import CaptureMetrics
from eagle_plugin.traffic.recorder import LONGEST, Recorder
from eagle_plugin.traffic.served import ServedTarget, told_served
from eagle_plugin.traffic.settings import CaptureError, CaptureSettings, capture_settings

logger = logging.getLogger(__name__)

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate")
OPT_OUT = b"x-eagle-capture"  # a request with this header is recorded only if it says "on"
DOMAIN = b"x-eagle-domain"  # names the kind of a request, for `eagle-plugin watch`; other values are ignored
DOMAIN_FORM = re.compile(rb"[a-z0-9_-]{1,32}")
JSON, EVENTS = b"application/json", b"text/event-stream"
MOST_COPIED = 256 << 20  # bytes of all requests and answers that are under way: each may be as long as `LONGEST`


class CaptureMiddleware:
    """Records the answers of `ROUTES` as the settings in the environment say; without settings it does nothing."""

    model = ""  # the label of the metrics; the engine's adapter sets it, and
    served: ServedTarget | None = None  # what answers; without these, as of `told_served`
    _recorders: ClassVar[list[Recorder]] = []  # of this process

    def __init__(self, app: Any, recorder: Recorder | None = None, rate: float = 1.0) -> None:
        """Start the writer process, unless a recorder is given (for tests)."""
        self._app, self._recorder, self._rate, self._copied = app, recorder, rate, _Copied()
        if recorder is None and (settings := capture_settings()):
            self._recorder, self._rate = self._start(settings), settings.rate

    def _start(self, settings: CaptureSettings) -> Recorder | None:
        """None if the writer does not start, although it did when the settings were checked: the server serves on.

        An exception would be that of the first request, and of each later one: the application is then built anew.
        """
        told_model, told = told_served()
        served, metrics = self.served or told, CaptureMetrics(self.model or told_model)
        try:
            recorder = Recorder(replace(settings, served=served and served.located()), metrics.update)
            self._recorders.append(recorder)
            atexit.register(recorder.close)  # an engine can end without the shutdown of its application
            return recorder
        except CaptureError as error:
            logger.error("eagle-plugin: %s; the server serves on and records nothing", error)
            return None

    @classmethod
    def close_all(cls) -> None:
        """Let the writers of this process finish what is queued: it may end without a shutdown of the application."""
        for recorder in cls._recorders:
            recorder.close()

    @staticmethod
    def is_starting() -> bool:
        """Whether the engine asks itself, to warm up; an adapter can replace it."""
        return False

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Pass on the request; nothing that goes wrong here may reach it."""
        recorder = self._recorder
        if recorder is None:
            return await self._app(scope, receive, send)
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, _closing(recorder, send))
        if not self._is_recorded(scope, recorder):
            return await self._app(scope, receive, send)
        copy = _Copy(receive, send, route_of(scope), domain_of(scope), self._copied)
        try:
            await self._app(scope, copy.receive, copy.send)
        finally:
            copy.finish(recorder)

    def _is_recorded(self, scope: Any, recorder: Recorder) -> bool:
        if scope["type"] != "http" or scope["method"] != "POST":
            return False
        if route_of(scope) not in ROUTES or self.is_starting():
            return False
        headers = dict(scope["headers"])
        if headers.get(OPT_OUT, b"on").strip().lower() != b"on":
            recorder.drop("opt_out")
            return False
        if headers.get(b"content-encoding", b"identity") != b"identity":
            recorder.drop("encoded")
            return False
        return self._rate >= 1 or random.random() < self._rate


def domain_of(scope: Any) -> str:
    """The domain that the client names; "" without one."""
    found = DOMAIN_FORM.fullmatch(dict(scope["headers"]).get(DOMAIN, b"").strip().lower())
    return found[0].decode() if found else ""


@dataclass
class _Copied:
    """What the copies of a server hold together."""

    bytes: int = 0


class _Copy:
    """The two callables that an application gets, which keep what passes through them."""

    def __init__(self, receive: Receive, send: Send, route: str, domain: str, all_copied: _Copied) -> None:
        self._receive, self._send, self._route, self._domain = receive, send, route, domain
        self._all, self._held, self._found_no_room = all_copied, 0, False
        self._began = time.time()
        self._request: list[bytes] = []
        self._answer: list[bytes] = []
        self._bytes = 0
        self._is_answer = self._ended = False
        self._encoded = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._keep(self._request, message)
        return message

    async def send(self, message: Message) -> None:
        await self._send(message)  # first: the client waits
        if message["type"] == "http.response.start":
            headers = dict(message.get("headers", ()))
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            self._is_answer = message["status"] == 200 and kind in (JSON, EVENTS)
            self._encoded = b"content-encoding" in headers
        elif message["type"] == "http.response.body" and self._is_answer:
            self._keep(self._answer, message)
            self._ended = not message.get("more_body", False)

    def _keep(self, parts: list[bytes], message: Message) -> None:
        body = message.get("body", b"")
        self._bytes += len(body)
        self._found_no_room |= self._all.bytes + len(body) > MOST_COPIED
        if self._bytes > LONGEST or self._found_no_room:  # what is dropped need not be kept until then
            self._forget()
        elif body:
            parts.append(body)
            self._held += len(body)
            self._all.bytes += len(body)

    def _forget(self) -> None:
        self._request.clear()
        self._answer.clear()
        self._all.bytes -= self._held
        self._held = 0

    def finish(self, recorder: Recorder) -> None:
        """Hand over the exchange; an answer that is none, such as an error, is not counted."""
        self._offer(recorder)
        self._forget()

    def _offer(self, recorder: Recorder) -> None:
        if not self._is_answer:
            return
        if self._encoded:
            recorder.drop("encoded")
        elif not self._ended:
            recorder.drop("aborted")
        elif self._bytes > LONGEST:
            recorder.drop("too_large")
        elif self._found_no_room:
            recorder.drop("queue_full")
        else:
            answer = b"".join(self._answer)
            drafts = ACCEPTED_DRAFTS.take(answer) or []
            request = b"".join(self._request)
            recorder.offer(Exchange(self._began, request, answer, self._route, self._domain, drafts))


def _closing(recorder: Recorder, send: Send) -> Send:
    """`send` of the server's lifespan, which lets the writer finish before the server says that it has shut down."""

    async def closing(message: Message) -> None:
        if message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
            await asyncio.to_thread(recorder.close)
        await send(message)

    return closing
