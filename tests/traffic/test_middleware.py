"""The middleware changes nothing that passes, and hands over what it should and nothing else."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from captured_traffic import answered, chat, delta, stream
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from eagle_plugin.traffic import middleware, recorder
from eagle_plugin.traffic.accepted_drafts import AcceptedDrafts
from eagle_plugin.traffic.frames import Exchange
from eagle_plugin.traffic.middleware import CaptureMiddleware

EVENTS = stream([delta(content=text) for text in ("Grüße", " an", " alle 🌳")] + [delta(finish="stop")])


class Kept:
    """In place of a recorder."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.dropped: Counter[str] = Counter()
        self.closed = 0

    def offer(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)

    def drop(self, reason: str) -> None:
        self.dropped[reason] += 1

    def close(self) -> None:
        self.closed += 1


def pieces(data: bytes) -> Iterator[bytes]:
    """Cut anywhere: in the middle of events and of characters."""
    while data:
        size = random.randint(1, 7)
        yield data[:size]
        data = data[size:]


async def answer(request: Request) -> Any:
    body = await request.json()
    if body.get("stream"):
        return StreamingResponse(pieces(EVENTS), media_type="text/event-stream")
    if body.get("refuse"):
        return JSONResponse({"error": "no"}, status_code=400)
    return JSONResponse(answered("Hello"))


def application() -> Starlette:
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
    return Starlette(routes=[Route(path, answer, methods=["POST"]) for path in paths])


def post(kept: Kept, body: Any, path: str = "/v1/chat/completions", rate: float = 1.0, **more: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        app = CaptureMiddleware(application(), kept, rate)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post(path, **({"json": body} | more))

    return asyncio.run(ask())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_passes_is_kept_and_not_changed(path: str, streamed: bool) -> None:
    kept, body = Kept(), chat("Grüße 🌳", stream=streamed)
    response = post(kept, body, path)
    (exchange,) = kept.exchanges
    assert json.loads(exchange.request) == body
    assert exchange.answer == response.content == (EVENTS if streamed else JSONResponse(answered("Hello")).body)
    assert not kept.dropped


@pytest.mark.parametrize(
    ("more", "dropped"),
    [
        ({"headers": {"X-Eagle-Capture": "off"}}, {"opt_out": 1}),
        ({"headers": {"x-eagle-capture": "No, thank you"}}, {"opt_out": 1}),
        ({"path": "/v1/embeddings"}, {}),
        ({"json": {"refuse": True}}, {}),
        ({"path": "/nowhere"}, {}),
    ],
)
def test_what_is_not_recorded(more: dict[str, Any], dropped: dict[str, int]) -> None:
    kept = Kept()
    post(kept, chat("Hi"), **more)
    assert not kept.exchanges and kept.dropped == dropped


def test_the_header_can_also_say_on() -> None:
    kept = Kept()
    post(kept, chat("Hi"), headers={"X-Eagle-Capture": "On"})
    assert len(kept.exchanges) == 1


def test_a_compressed_request_is_counted() -> None:
    kept = Kept()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await JSONResponse(answered("A"))(scope, receive, send)

    async def ask() -> None:
        transport = httpx.ASGITransport(CaptureMiddleware(app, kept))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = gzip.compress(json.dumps(chat("Hi")).encode())
            await client.post("/v1/completions", content=body, headers={"content-encoding": "gzip"})

    asyncio.run(ask())
    assert not kept.exchanges and kept.dropped == {"encoded": 1}


def test_the_rate_is_the_share_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, drawn = Kept(), random.Random(5)
    monkeypatch.setattr(middleware.random, "random", drawn.random)
    for _ in range(200):
        post(kept, chat("Hi"), rate=0.25)
    assert 30 < len(kept.exchanges) < 70 and not kept.dropped


def scope(path: str = "/v1/chat/completions", root: str = "") -> dict[str, Any]:
    return {"type": "http", "method": "POST", "path": root + path, "root_path": root, "headers": []}


def run(app: Any, kept: Kept, given: dict[str, Any]) -> list[Any]:
    """The messages that are sent on."""
    sent = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(chat("Hi")).encode(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(CaptureMiddleware(app, kept)(given, receive, send))
    return sent


def streams(*parts: bytes, ends: bool) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if not ends:
            raise ConnectionResetError("the client is gone")
        await send({"type": "http.response.body", "body": b""})

    return app


def test_a_stream_that_ends_early_is_counted_and_its_error_passes() -> None:
    kept = Kept()
    with pytest.raises(ConnectionResetError, match="the client is gone"):
        run(streams(EVENTS, ends=False), kept, scope())
    assert not kept.exchanges and kept.dropped == {"aborted": 1}


def test_an_answer_that_is_too_long_is_counted_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert middleware.LONGEST == recorder.LONGEST
    monkeypatch.setattr(middleware, "LONGEST", 500)
    kept = Kept()
    sent = run(streams(*[b"x" * 200] * 4, ends=True), kept, scope())
    assert len(sent) == 6 and not kept.exchanges and kept.dropped == {"too_large": 1}


def test_all_copies_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers that run at the same time, of which the second finds no room; a third one, later, has it again."""
    monkeypatch.setattr(middleware, "MOST_COPIED", 700)
    kept = Kept()

    async def all_of_them() -> None:
        waiting, both = [], asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            headers = [(b"content-type", middleware.EVENTS)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"x" * 400, "more_body": True})
            waiting.append(1)
            if len(waiting) == 2:
                both.set()
            await both.wait()
            await send({"type": "http.response.body", "body": b"y"})

        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}"}

        async def send(message: Any) -> None: ...

        app = CaptureMiddleware(app, kept)
        await asyncio.gather(*(app(scope(), receive, send) for _ in range(2)))
        await app(scope(), receive, send)

    asyncio.run(all_of_them())
    assert [len(exchange.answer) for exchange in kept.exchanges] == [401, 401]
    assert kept.dropped == {"queue_full": 1}


def test_a_server_below_a_root_path() -> None:
    kept = Kept()
    run(streams(EVENTS, ends=True), kept, scope(root="/api"))
    run(streams(EVENTS, ends=True), kept, scope(path="/other/v1/completions"))
    assert [exchange.answer for exchange in kept.exchanges] == [EVENTS]


def test_the_writer_is_closed_before_the_server_ends() -> None:
    kept, closed = Kept(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for kind in ("startup", "shutdown"):
            await send({"type": f"lifespan.{kind}.complete"})
            closed.append(kept.closed)

    run(app, kept, {"type": "lifespan"})
    assert closed == [0, 1]


def test_without_settings_the_middleware_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLE_CAPTURE", raising=False)
    app = CaptureMiddleware(streams(EVENTS, ends=True))
    assert app._recorder is None


def test_a_writer_that_does_not_start_after_the_check_stops_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EAGLE_CAPTURE", str(tmp_path))
    monkeypatch.setenv("EAGLE_CAPTURE_PYTHON", shutil.which("false"))
    monkeypatch.setattr(middleware, "CaptureMetrics", lambda model: SimpleNamespace(update=None))
    app = application()
    app.add_middleware(CaptureMiddleware)  # is made with the first request, as in a server

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/v1/completions", json=chat("Hi"))

    assert [asyncio.run(ask()).status_code for _ in range(2)] == [200, 200]
    (record,) = caplog.records
    assert "ended with code 1 before it was ready" in record.message and "records nothing" in record.message


@pytest.mark.parametrize(
    ("given", "kept"),
    [("code", "code"), (" Code ", "code"), ("a-b_9", "a-b_9"), ("x" * 32, "x" * 32), ("x" * 33, ""), ("", "")]
    + [("two words", ""), ("a.b", ""), ("kode\u00e4".encode("latin-1"), "")],
)
def test_the_domain_that_a_client_names(given: Any, kept: str) -> None:
    found = Kept()
    post(found, chat("Hi"), headers={"X-Eagle-Domain": given})
    assert [exchange.domain for exchange in found.exchanges] == [kept]


@pytest.mark.parametrize("streamed", [False, True])
def test_accepted_drafts_come_with_the_answer_of_their_request(streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = AcceptedDrafts()
    monkeypatch.setattr(middleware, "ACCEPTED_DRAFTS", noted)
    noted.note("chatcmpl-1", [3, 1, 0])
    noted.note("chatcmpl-2", [9])
    kept, body = Kept(), answered("Hello", extra={"id": "chatcmpl-2"})
    sent = stream([{"id": "chatcmpl-1", **delta(content="A")}]) if streamed else json.dumps(body).encode()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        kind = b"text/event-stream" if streamed else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": sent})

    for _ in range(2):
        run(app, kept, scope())
    assert [exchange.accepted_drafts for exchange in kept.exchanges] == [[3, 1, 0], []]


def test_what_the_engine_asks_itself_as_it_starts_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    for starts in (True, False):
        monkeypatch.setattr(CaptureMiddleware, "is_starting", staticmethod(lambda starts=starts: starts))
        post(kept, chat("Hi"))
    assert len(kept.exchanges) == 1 and not kept.dropped
