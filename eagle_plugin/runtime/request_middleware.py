"""ASGI middleware of both engines' servers: brings what a request says of its drafts to the engine's own parameters.

A client says it in the JSON body, {"eagle_plugin": {"draft": false}}, or in a header; an engine knows neither. Nobody
reads a body before the application does, so that a request that the application turns away is not read here either.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from eagle_plugin.collect.settings import COLLECTS_HEADER, QUEUE_HEADER, collect_settings
from eagle_plugin.common.asgi import Message, Receive, Send, route_of
from eagle_plugin.runtime.request_features import read_features, text_of
from eagle_plugin.runtime.request_sources import FIELD, RequestError, read_sources

ROUTES = ("/v1/chat/completions", "/v1/completions")
HEADER = b"x-eagle-plugin"
_NAME = FIELD.encode()


class RequestMiddleware:
    """Puts the field of a request, or its header, under the same name into `parameters`, a field that the engine has.

    What cannot be read is answered with HTTP 400. A body without the field, of a request without the header, is passed
    on as it came, and so are all answers.
    """

    parameters = ""  # an adapter's subclass names it

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Pass on the request."""
        if scope["type"] != "http" or scope["method"] != "POST" or route_of(scope) not in ROUTES:
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        if headers.get(b"content-encoding", b"identity") != b"identity":
            return await self._app(scope, receive, send)
        request = _Request(self, scope, receive, send, headers.get(HEADER))
        await self._app(scope, request.receive, request.send)

    @cached_property
    def of_collected(self) -> list[tuple[bytes, bytes]]:
        """Headers of an answer whose hidden states are stored."""
        settings = collect_settings()
        given = {COLLECTS_HEADER: "on"} | ({QUEUE_HEADER: str(settings.queue_bytes)} if settings else {})
        return [(name.encode(), value.encode()) for name, value in given.items()]


class _Request:
    """The two callables that an application gets."""

    def __init__(
        self, middleware: RequestMiddleware, scope: Any, receive: Receive, send: Send, header: bytes | None
    ) -> None:
        self._middleware, self._scope, self._receive, self._send = middleware, scope, receive, send
        self._header = header
        self._is_read = self._is_answered = False
        self._refusal: bytes | None = None
        self._collects = False

    async def receive(self) -> Message:
        """The whole body at once, changed where it has to be, then what the server says."""
        if self._is_read:
            return await self._receive()
        parts: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] != "http.request":  # the client has gone
                return message
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        self._is_read = True
        given = b"".join(parts)
        try:
            body = self._changed(given)
        except RequestError as error:
            self._refusal, body = _refusal(error), b""  # no engine serves an empty body: it answers, and we replace it
        if body is not given:
            headers = [(name, value) for name, value in self._scope["headers"] if name != b"content-length"]
            self._scope["headers"][:] = [*headers, (b"content-length", str(len(body)).encode())]
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Pass on the answer, or give our own in its place."""
        if self._refusal is None:
            if self._collects and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self._middleware.of_collected]}
            return await self._send(message)
        if self._is_answered:
            return
        self._is_answered = True
        length = str(len(self._refusal)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await self._send({"type": "http.response.start", "status": 400, "headers": headers})
        await self._send({"type": "http.response.body", "body": self._refusal})

    def _changed(self, body: bytes) -> bytes:
        if self._header is None and _NAME not in body:
            return body
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):  # the engine says what is wrong
            return body
        if not isinstance(request, dict):
            return body
        given = request.pop(FIELD, None)
        if given is None and self._header is not None:
            given = self._header.decode("latin-1")
        name = self._middleware.parameters
        sources, features, parameters = read_sources(given), read_features(given), request.get(name)
        if given is None:
            if isinstance(parameters, dict):
                for read in (read_sources, read_features):
                    read(parameters.get(FIELD))  # an engine may refuse it when the answer has begun
            return body
        if parameters is None:
            parameters = {}
        if isinstance(parameters, dict):  # else the engine says what is wrong
            request[name] = parameters | {FIELD: text_of(sources, features)}
            self._collects = features is not None
        return json.dumps(request).encode()


def _refusal(error: RequestError) -> bytes:
    """The answer, in the form that clients of this protocol read."""
    fault = {"message": str(error), "type": "BadRequestError", "param": FIELD, "code": 400}
    return json.dumps({"error": fault}).encode()
