"""Servers that training asks: a key that no request can carry, and answers that cannot be decoded."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from rich.console import Console
from token_endpoint import answer_body

from eagle_plugin.collect.settings import COLLECTS_HEADER
from eagle_plugin.common.errors import UserError
from eagle_plugin.learning.data.collecting import servers
from eagle_plugin.learning.data.collecting.servers import Asked, FeatureServers
from eagle_plugin.learning.data.generation.run import GenerationSettings

SETTINGS = GenerationSettings(max_tokens=1, collects=True, first_pause_s=0.0, tries=1)
DOCUMENTS = [Asked(f"doc-{number}", "chat", "train", [3, 4, 5], 2) for number in range(3)]


@contextmanager
def opened(settings: GenerationSettings = SETTINGS) -> Iterator[FeatureServers]:
    made = FeatureServers(["http://server"], settings, Console(quiet=True))
    try:
        yield made
    finally:
        made.close()


def test_a_key_that_no_header_has_is_named_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_API_KEY", "abc def")
    with pytest.raises(UserError, match="EAGLE_API_KEY has a space"), opened():
        pass
    assert "feature-servers" not in {thread.name for thread in threading.enumerate()}


class Gateway:
    """A server whose gateway says of some answers that they are compressed, which they are not."""

    def __init__(self) -> None:
        self.wrong, self.unreachable = 0, 0  # answers
        self.given, self.sent_wrong = Counter[str](), 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.unreachable:
            self.unreachable -= 1
            raise httpx.ConnectError("nobody listens", request=request)
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "target"}]})
        if self.wrong:
            self.wrong -= 1
            self.sent_wrong += 1
            return httpx.Response(200, headers={"content-encoding": "gzip"}, content=b"not compressed")
        body: dict[str, Any] = json.loads(request.content)
        self.given[body["eagle_plugin"]["features"]["id"]] += 1
        answer = answer_body("vllm", request.url.path, "", [3])
        return httpx.Response(200, headers={COLLECTS_HEADER: "on"}, json=answer)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    made = Gateway()
    monkeypatch.setattr(servers, "make_client", lambda _: httpx.AsyncClient(transport=httpx.MockTransport(made)))
    monkeypatch.setattr(servers, "REOPEN_S", 0.001)
    monkeypatch.setattr(servers, "PATIENCE_S", 10.0)
    return made


def test_an_answer_that_cannot_be_decoded_is_asked_for_again(gateway: Gateway) -> None:
    with opened() as served:
        gateway.wrong = 1
        served.ask(DOCUMENTS)
    assert gateway.sent_wrong == 1 and {document.id for document in DOCUMENTS} <= gateway.given.keys()


def test_a_server_comes_back_after_answers_that_cannot_be_decoded(gateway: Gateway) -> None:
    """It stops listening, and while it starts again its first answers are wrong."""
    with opened() as served:
        gateway.unreachable, gateway.wrong = 2, 2
        served.ask(DOCUMENTS[:1])
    assert gateway.sent_wrong == 2 and DOCUMENTS[0].id in gateway.given
