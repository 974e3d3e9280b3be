"""The middleware brings the field to the engine's own parameters, refuses what it cannot read, and changes no more."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from eagle_plugin.runtime import request_middleware
from eagle_plugin.runtime.request_middleware import RequestMiddleware

EVENTS = [f"data: {number}\n\n".encode() for number in range(5)]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Ours(RequestMiddleware):
    parameters = "custom_params"


class World:
    """An application with the middleware, and what reached it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.lengths: list[str] = []

    async def answer(self, request: Request) -> Any:
        if request.headers.get("authorization") == "wrong":
            return JSONResponse({"error": "who are you"}, status_code=401)
        body = await request.body()
        self.bodies.append(body)
        self.lengths.append(_length(request))
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            return JSONResponse({"error": "no JSON"}, status_code=422)
        if isinstance(fields, dict) and fields.get("stream"):
            return StreamingResponse(self._events(), media_type="text/event-stream")
        return JSONResponse({"fields": fields})

    async def _events(self) -> AsyncIterator[bytes]:
        for event in EVENTS:
            yield event

    def post(self, body: bytes, path: str = CHAT, pieces: bool = False, **headers: str) -> httpx.Response:
        async def ask() -> httpx.Response:
            routes = [Route(path, self.answer, methods=["POST"]) for path in (CHAT, COMPLETIONS, "/generate")]
            transport = httpx.ASGITransport(Ours(Starlette(routes=routes)))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                content: Any = _pieces(body) if pieces else body
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                return await client.post(path, content=content, headers=named)

        return asyncio.run(ask())


def _length(request: Request) -> str:
    return dict(request.scope["headers"]).get(b"content-length", b"").decode()


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    while data:
        size = random.randint(1, 7)
        yield data[:size]
        data = data[size:]


def body_of(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Grüße 🌳"}]} | fields, indent=1).encode()


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_field_moves(path: str, pieces: bool) -> None:
    world = World()
    answer = world.post(body_of(temperature=0.5, eagle_plugin={"draft": False}), path, pieces)
    wanted = json.loads(body_of(temperature=0.5, custom_params={"eagle_plugin": "draft=off"}))
    assert answer.status_code == 200 and answer.json()["fields"] == wanted
    assert world.lengths == [str(len(world.bodies[0]))]


def test_parameters_of_the_client_stay() -> None:
    given = {"a": [1, 2], "eagle_plugin": {"draft": True}}
    answer = World().post(body_of(custom_params=given, eagle_plugin={"sources": ["head"]}))
    assert answer.json()["fields"]["custom_params"] == {"a": [1, 2], "eagle_plugin": "sources=head"}


def test_a_header_counts_where_there_is_no_field() -> None:
    off = {"X_Eagle_Plugin": "draft=off"}
    assert World().post(body_of(), **off).json()["fields"]["custom_params"] == {"eagle_plugin": "draft=off"}
    answer = World().post(body_of(eagle_plugin={"sources": ["lookup"]}), **off)
    assert answer.json()["fields"]["custom_params"] == {"eagle_plugin": "sources=lookup"}


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (body_of(), {}),
        (body_of(note="eagle_plugin"), {}),
        (body_of(custom_params={"eagle_plugin": {"draft": False}}), {}),
        (body_of(eagle_plugin=None), {}),
        (b'{"eagle_plugin": ', {}),
        (b'["eagle_plugin"]', {}),
        (b"", {}),
        (b"", {"X_Eagle_Plugin": "draft=off"}),
        (b"[" * 100_000 + b'"eagle_plugin"', {}),
    ],
)
def test_what_passes_as_it_came(body: bytes, headers: dict[str, str]) -> None:
    world = World()
    world.post(body, **headers)
    assert world.bodies == [body] and world.lengths == [str(len(body))]


def test_a_body_without_the_name_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(body: bytes) -> Any:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(request_middleware, "json", SimpleNamespace(loads=loads))
    assert World().post(body_of()).status_code == 200
    with pytest.raises(AssertionError, match="it was parsed"):
        World().post(body_of(eagle_plugin={"draft": True}))


def test_other_routes_and_compressed_bodies_pass() -> None:
    body = body_of(eagle_plugin={"draft": "no"})
    for path, headers in (("/generate", {}), (CHAT, {"content_encoding": "gzip"})):
        world = World()
        world.post(body, path, **headers)
        assert world.bodies == [body]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("fields", "headers", "sentence"),
    [
        ({"eagle_plugin": {"draft": "no"}}, {}, 'eagle_plugin.draft is "no", wanted true or false'),
        ({"custom_params": {"eagle_plugin": {"draft": 1}}}, {}, "eagle_plugin.draft is 1, wanted true or false"),
        ({}, {"X_Eagle_Plugin": "sources=x"}, 'eagle_plugin.sources has "x", wanted head or lookup'),
    ],
)
def test_what_cannot_be_read_is_refused(
    streams: bool, fields: dict[str, Any], headers: dict[str, str], sentence: str
) -> None:
    world = World()
    answer = world.post(body_of(stream=streams, **fields), **headers)
    assert answer.status_code == 400 and answer.headers["content-length"] == str(len(answer.content))
    assert answer.json() == {
        "error": {"message": sentence, "type": "BadRequestError", "param": "eagle_plugin", "code": 400}
    }
    assert world.bodies == [b""], "the application served it"


def test_who_is_turned_away_is_not_read() -> None:
    world = World()
    answer = world.post(body_of(eagle_plugin={"draft": "no"}), authorization="wrong")
    assert answer.status_code == 401 and not world.bodies


def test_an_answer_streams_through() -> None:
    """Each event leaves when the application sends it."""
    sent: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert json.loads((await receive())["body"])["custom_params"] == {"eagle_plugin": "draft=off"}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number, event in enumerate(EVENTS, start=1):
            await send({"type": "http.response.body", "body": event, "more_body": True})
            assert len(sent) == number
        assert (await receive())["type"] == "http.disconnect"

    async def run() -> None:
        body = body_of(stream=True, eagle_plugin={"draft": False})
        messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                sent.append(message["body"])

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
        await Ours(app)(scope, receive, send)

    asyncio.run(run())
    assert sent == EVENTS


def test_a_client_that_goes_is_gone() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"

    async def run() -> None:
        messages = [{"type": "http.request", "body": b'{"eagle', "more_body": True}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            raise AssertionError(message)

        await Ours(app)({"type": "http", "method": "POST", "path": CHAT, "headers": []}, receive, send)

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
def test_other_traffic_passes(kind: str) -> None:
    seen = []

    async def app(*given: Any) -> None:
        seen.append(given)

    given = ({"type": kind, "path": CHAT}, object(), object())
    asyncio.run(Ours(app)(*given))  # type: ignore[arg-type]
    assert seen == [given]
