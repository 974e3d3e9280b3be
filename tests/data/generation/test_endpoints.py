"""What servers and gateways between them can answer: rate limits, a wrong key, another model."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from token_endpoint import TokenEndpoint

from eagle_plugin.common.errors import UserError
from eagle_plugin.common.http_access import key_headers, tls_context
from eagle_plugin.learning.data.generation import endpoints, waiting
from eagle_plugin.learning.data.generation.endpoints import RETRIES, TargetEndpoint
from eagle_plugin.learning.data.generation.journal import Journal
from eagle_plugin.learning.data.generation.run import GenerationSettings, generate
from eagle_plugin.learning.data.rows import DataError, read_rows
from eagle_plugin.learning.data.sources.prompts import Prompt, format_prompt

KEY = "sk-tr4nquil"


def ask(folder: Path, *servers: TokenEndpoint, count: int = 1, out: str = "rows.jsonl") -> tuple[list[str], str]:
    """The ids of the rows that the servers' answers gave, and what was printed."""
    prompts = folder / "prompts.jsonl"
    own = [Prompt(f"p{n}", "test", messages=[{"role": "user", "content": f"question {n}"}]) for n in range(count)]
    prompts.write_text("".join(map(format_prompt, own)))
    console = Console(record=True, width=500, quiet=False, file=(folder / "printed").open("w"))
    with Journal(folder / out) as journal:
        settings = GenerationSettings(first_pause_s=0.01)
        asyncio.run(generate(prompts, [server.url for server in servers], journal, settings, console))
    return sorted(row.id for row in read_rows(folder / out)), console.export_text()


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EAGLE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("status", "headers"), [(429, {}), (429, {"Retry-After": "0"}), (503, {"Retry-After": "0"})])
def test_a_rate_limit_is_waited_for(status, headers, tmp_path):
    """Longer than a request that fails is tried."""
    left = 2 * RETRIES

    def limited(path, body):
        nonlocal left
        if "messages" in body and left:
            left -= 1
            return status, {"error": "too many requests"}
        return None

    with TokenEndpoint(behaviour=limited, headers=headers) as server:
        rows, printed = ask(tmp_path, server, count=3)
    assert rows == ["p0#0", "p1#0", "p2#0"] and left == 0
    assert printed.count(f"wants requests later (HTTP {status}") == 1


def test_a_rate_limit_at_the_start_is_waited_for(monkeypatch):
    """Two pauses of a second are longer than a server may take for its first token."""
    monkeypatch.setattr(endpoints, "FIRST_TOKEN_S", 1.2)
    choice = {"prompt_token_ids": [1], "token_ids": [2], "finish_reason": "length", "text": "a"}
    left, answered = 2, httpx.Response(200, json={"choices": [choice]})

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal left
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "model"}]})
        left -= 1
        return httpx.Response(429, headers={"retry-after": "1"}) if left >= 0 else answered

    async def opened() -> str:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            endpoint = TargetEndpoint("http://server", client, first_pause_s=0.01)
            await endpoint.open()
            return endpoint.model

    assert asyncio.run(opened()) == "model" and left == -1


def test_a_limit_that_does_not_end_is_no_endless_run(tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.0)
    with (
        TokenEndpoint(behaviour=lambda path, body: (429, {}) if "messages" in body else None) as server,
        pytest.raises(DataError, match="no endpoint answers .*HTTP 429.*to every request for .* run the same command"),
    ):
        ask(tmp_path, server)


def test_a_server_that_limits_its_list_of_models_is_alive(tmp_path):
    """A request that fails is then asked again by the next run, and the others are answered."""

    def failing(path, body):
        server.listing = 429 if "messages" in body else 200
        return (500, {}) if body.get("messages", [{}])[0].get("content") == "question 0" else None

    with TokenEndpoint(behaviour=failing) as server:
        rows, _ = ask(tmp_path, server, count=3)
    assert rows == ["p1#0", "p2#0"]


def test_the_time_to_wait_is_a_number_or_a_date_with_a_bound():
    soon = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=30), usegmt=True)
    for text, least, most in (("7", 7, 7), (soon, 20, 30), ("", 0, 0), ("later", 0, 0), ("9" * 400, 1e9, float("inf"))):
        found = waiting._retry_after(httpx.Response(429, headers={"Retry-After": text}))
        assert least <= found <= most, text
    pause = waiting.Pause()
    assert pause.lengthen(httpx.Response(429, headers={"Retry-After": "86400"}), 0.5)
    assert pause.until - pause.since == waiting.LONGEST_PAUSE_S


@pytest.mark.parametrize("name", ["EAGLE_API_KEY", "OPENAI_API_KEY"])
def test_the_key_is_sent_and_shown_nowhere(name, tmp_path, monkeypatch):
    with TokenEndpoint(key=KEY) as server:
        with pytest.raises(DataError, match="no endpoint answers .*HTTP 401: .*, set EAGLE_API_KEY to a key of this"):
            ask(tmp_path, server)
        monkeypatch.setenv(name, f" {KEY}\n")
        rows, printed = ask(tmp_path, server)
        assert rows == ["p0#0"]
        monkeypatch.setenv(name, f"{KEY}-of-others")
        with pytest.raises(DataError, match=f"it does not accept the key of {name}") as refused:
            ask(tmp_path, server, out="other.jsonl")
    files = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY not in printed + str(refused.value) + files and "***" in str(refused.value)


def test_a_key_that_is_no_header_is_refused_without_showing_it(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of others")
    for wrong in (f"{KEY} and more", f"{KEY}é", f"{KEY}\nX-Other: 1"):
        monkeypatch.setenv("EAGLE_API_KEY", wrong)
        with pytest.raises(UserError, match="EAGLE_API_KEY has a space or a character") as refused:
            key_headers()
        assert KEY not in str(refused.value)


def test_the_authorities_of_the_environment_are_trusted(tmp_path, monkeypatch):
    import certifi

    first = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    own = tmp_path / "ca.pem"
    own.write_text(first[0] + first[1])
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert len(tls_context().get_ca_certs()) > 1
    monkeypatch.setenv("SSL_CERT_FILE", str(own))
    assert len(tls_context().get_ca_certs()) == 1
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "gone.pem"))
    with pytest.raises(UserError, match=r"SSL_CERT_FILE=.*gone.pem cannot be read .*; correct or unset it"):
        tls_context()


def test_servers_of_different_models_are_refused(tmp_path):
    """The same model in another folder is the same."""
    with TokenEndpoint(model="/a/llama") as one, TokenEndpoint(model="/b/c/llama/") as again:
        assert ask(tmp_path, one, again)[0] == ["p0#0"]
        with (
            TokenEndpoint(model="/a/qwen") as other,
            pytest.raises(DataError, match="serves the model /a/llama and .* /a/qwen, wanted one target"),
        ):
            ask(tmp_path, one, other, out="other.jsonl")


def test_rows_of_another_model_are_not_continued(tmp_path):
    with TokenEndpoint(model="qwen") as other:
        with TokenEndpoint(model="/a/llama") as one:
            ask(tmp_path, one)
        noted = tmp_path / "rows.model.json"
        assert json.loads(noted.read_text()) == {"model": "llama"}
        with pytest.raises(DataError, match=r"has answers of the model llama, and the servers have qwen; .*model.json"):
            ask(tmp_path, other, count=2)
        noted.unlink()  # or of a version that did not note it
        assert ask(tmp_path, other, count=2)[0] == ["p0#0", "p1#0"]
        with TokenEndpoint(model="llama") as one:
            (tmp_path / "rows.jsonl").write_text("")
            assert ask(tmp_path, one)[0] == ["p0#0"]  # no row of the other is left
    assert json.loads(noted.read_text()) == {"model": "llama"}
