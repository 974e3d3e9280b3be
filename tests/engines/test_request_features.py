"""What requests say of their hidden states is read, carried by an engine, answered with a header, or refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from eagle_plugin.runtime.request_features import Features, asked_features, read_features, text_of
from eagle_plugin.runtime.request_middleware import RequestMiddleware
from eagle_plugin.runtime.request_sources import ALL, FIELD, NONE, RequestError, Sources, read_sources

ASKED: dict[str, Any] = {"id": "chat-1#0", "source": "chat", "split": "val", "given": 3}


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_FEATURES", "/data/features")


@pytest.mark.parametrize("sources", [ALL, NONE, Sources(head=True, lookup=False)])
@pytest.mark.parametrize(
    "asked", [None, Features("a"), Features(**ASKED), Features("d", given=9, earlier=((1, 4), (5, 7)))]
)
def test_an_engine_carries_both_as_one_text(sources: Sources, asked: Features | None) -> None:
    text = text_of(sources, asked)
    assert isinstance(text, str) and read_sources(text) == sources and read_features(text) == asked
    assert asked_features({FIELD: text}) == asked


@pytest.mark.parametrize("value", [None, {}, {"features": None}, {"features": False}, "draft=off", {"draft": False}])
def test_nothing_is_stored_unless_it_is_asked_for(value: object) -> None:
    assert read_features(value) is None


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (True, 'eagle_plugin.features is true, wanted an object with the name of a document: {"id": "chat-1"}'),
        ({"source": "x"}, 'eagle_plugin.features is {"source": "x"}, wanted an object with the name'),
        ({"id": "a", "name": "b"}, 'eagle_plugin.features has the name "name", wanted one of id, source, split, given'),
        ({"id": "a", "split": "test"}, 'eagle_plugin.features.split is "test", wanted train or val'),
        ({"id": "a", "given": 0}, "eagle_plugin.features.given is 0, wanted how many tokens of the prompt precede"),
        ({"id": "a", "given": 5, "earlier": [[1, 6]]}, "eagle_plugin.features.earlier is [[1, 6]], wanted begin and"),
        ({"id": "a", "given": 5, "earlier": [[2, 4], [1, 5]]}, "eagle_plugin.features.earlier is [[2, 4], [1, 5]]"),
        ({"id": "a", "earlier": [[0, 1]]}, "eagle_plugin.features.earlier is [[0, 1]], wanted"),
        ({"id": "a", "given": 5, "earlier": 3}, "eagle_plugin.features.earlier is 3, wanted"),
        ({"id": "a" * 400}, "eagle_plugin.features has an id or a source that is no text of at most 300 characters"),
    ],
)
def test_what_is_refused(value: object, sentence: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_features({"features": value})
    assert str(refused.value).startswith(sentence)


class Ours(RequestMiddleware):
    parameters = "vllm_xargs"


def post(body: dict[str, Any]) -> tuple[httpx.Response, list[Any]]:
    reached: list[Any] = []

    async def answer(request: Request) -> Any:
        reached.append(json.loads(await request.body() or b"null"))
        return JSONResponse({})

    async def ask() -> httpx.Response:
        app = Ours(Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])]))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/v1/completions", json=body)

    return asyncio.run(ask()), reached


def test_a_client_learns_whether_its_states_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_FEATURES_QUEUE_MIB", "64")
    answer, (body,) = post({"prompt": "x", FIELD: {"features": ASKED, "draft": False}})
    assert answer.headers["x-eagle-features"] == "on" and FIELD not in body
    assert answer.headers["x-eagle-features-queue"] == str(64 << 20)
    assert read_features(body["vllm_xargs"][FIELD]) == Features(**ASKED)
    assert read_sources(body["vllm_xargs"][FIELD]) == NONE
    answer, _ = post({"prompt": "x", FIELD: {"draft": False}})
    assert "x-eagle-features" not in answer.headers


def test_a_server_that_stores_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLE_FEATURES")
    answer, reached = post({"prompt": "x", FIELD: {"features": ASKED}})
    assert answer.status_code == 400 and "x-eagle-features" not in answer.headers
    message = answer.json()["error"]["message"]
    assert message == "eagle_plugin.features is asked for, and this server was started without EAGLE_FEATURES"
    assert asked_features({FIELD: {"features": ASKED}}) is None
