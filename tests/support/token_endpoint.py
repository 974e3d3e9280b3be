"""A small HTTP server that answers like SGLang or vLLM; equal prompts get equal tokens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EOS = 2

Behaviour = Callable[[str, dict[str, Any]], "tuple[int, dict[str, Any]] | list[int] | None"]


def token_ids(text: str, length: int = 12) -> list[int]:
    """Tokens that depend on the text only, with a stop token at the end."""
    digest = hashlib.sha256(text.encode()).digest()
    return [3 + digest[i % 32] for i in range(length - 1)] + [EOS]


def answer_body(
    style: str, path: str, asked: str, ids: list[int], message: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The body of a response in the form of SGLang or vLLM."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if ids[-1:] == [EOS] else "length"}
    prompt_ids = [1, *token_ids(asked, 6)]
    text = f"answer {ids[0] if ids else ''}"
    if not path.endswith("/chat/completions"):
        return {"choices": [{**choice, "text": text, "prompt_token_ids": prompt_ids, "token_ids": ids}]}
    choice["message"] = message or {"role": "assistant", "content": text}
    if style == "sglang":
        return {"choices": [{**choice, "prompt_token_ids": prompt_ids, "response_token_ids": ids}]}
    return {"prompt_token_ids": prompt_ids, "choices": [{**choice, "token_ids": ids}]}


class TokenEndpoint:
    """`with TokenEndpoint("sglang") as server:` serves on 127.0.0.1 until the block ends.

    behaviour: called with the route and the body of a request; returns (status, body), or response ids, or None for the
        default answer.
    requests: the bodies of the requests, in order.
    headers: of every answer.
    model: that it lists.
    key: the API key, without which it answers nothing.
    listing: status of its list of models.
    port: 0 for any.
    """

    def __init__(
        self,
        style: str = "sglang",
        behaviour: Behaviour | None = None,
        delay_s: float = 0.0,
        headers: Mapping[str, str] | None = None,
        port: int = 0,
        model: str = "the-target",
        key: str = "",
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        self._connections: list[socket.socket] = []
        self.listing = 200
        self._style, self._behaviour, self._delay_s = style, behaviour, delay_s
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                endpoint._connections.append(self.connection)

            def do_GET(self) -> None:
                if self._has_key():
                    self._send(endpoint.listing, {"data": [{"id": model}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not self._has_key():
                    return
                endpoint.requests.append(body)
                time.sleep(endpoint._delay_s)
                self._send(*endpoint._answer(self.path, body))

            def _has_key(self) -> bool:
                given = self.headers.get("Authorization")
                if key and given != f"Bearer {key}":
                    self._send(401, {"error": f"wrong key: {given}"})  # as some gateways write it
                return not key or given == f"Bearer {key}"

            def _send(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *values: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # the client was killed

        self._server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> TokenEndpoint:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:  # a client may keep one open
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        special = self._behaviour(path, body) if self._behaviour else None
        if isinstance(special, tuple):
            return special
        asked = json.dumps([body.get("messages"), body.get("prompt"), body["temperature"]], sort_keys=True)
        ids = special if special is not None else token_ids(asked)
        return 200, answer_body(self._style, path, asked, ids)
