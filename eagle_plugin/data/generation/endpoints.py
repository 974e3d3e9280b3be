"""One OpenAI-compatible server that answers with token ids, and what to do when it fails."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import httpx

from eagle_plugin.data.rows import DataError

RETRIES = 5
FIRST_PAUSE_S = 0.5  # doubled after every failure
_BUSY = (408, 429)  # worth asking again, like every 5xx
_MISDIRECTED = (401, 403, 404, 405)  # these say that the address or the model is wrong, not the prompt


class Refused(Exception):
    """The server answers other requests but not this one; the text says why."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final  # asking again later cannot help


class EndpointDead(Exception):
    """The server answers nothing any more."""


@dataclass(frozen=True)
class Answer:
    """One generated turn."""

    prompt_ids: list[int]  # as the server tokenised the request
    response_ids: list[int]  # with the stop token
    finish: str  # "stop" or "length"
    message: dict[str, Any]  # what a next request puts into its history

    @property
    def text(self) -> str:
        """Everything a reader would see: reasoning, content and the arguments of tool calls."""
        calls = [str(call.get("function", {}).get("arguments", "")) for call in self.message.get("tool_calls") or []]
        parts = [self.message.get("reasoning_content"), self.message.get("content"), *calls]
        return "\n".join(part for part in parts if part)


@dataclass
class Endpoint:
    """One server: `url` with or without /v1, asked through a client that the caller closes."""

    url: str
    client: httpx.AsyncClient
    model: str = ""  # the first one that the server lists, if empty
    first_pause_s: float = FIRST_PAUSE_S
    dead: str = ""  # why it is left out
    _base: str = field(init=False)

    def __post_init__(self) -> None:
        self._base = self.url.rstrip("/").removesuffix("/v1")

    async def open(self) -> None:
        """Learn the model's name and make sure that answers carry token ids.

        Raises:
            EndpointDead: the server cannot be reached or does not know the model.
            DataError: it answers without token ids.
        """
        try:
            listed = await self.client.get(f"{self._base}/v1/models")
            listed.raise_for_status()
            self.model = self.model or listed.json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EndpointDead(_describe(error)) from error
        except (ValueError, LookupError, TypeError) as error:
            raise EndpointDead("/v1/models lists no model; name one with --model") from error
        try:
            await self.complete("Hello", {"max_tokens": 1, "temperature": 0})
        except Refused as error:
            raise EndpointDead(f"it refused a first request: {error}") from error

    async def chat(self, messages: list[dict[str, Any]], tools: list[Any] | None, sampling: dict[str, Any]) -> Answer:
        """Answer a conversation; raises Refused, EndpointDead or DataError (no token ids)."""
        body = {"messages": messages, "tools": tools} if tools else {"messages": messages}
        return await self._ask("chat/completions", body, sampling)

    async def complete(self, prompt: str | list[int], sampling: dict[str, Any]) -> Answer:
        """Continue a raw prompt; raises like `chat`."""
        return await self._ask("completions", {"prompt": prompt}, sampling)

    async def _ask(self, route: str, body: dict[str, Any], sampling: dict[str, Any]) -> Answer:
        body = {"model": self.model, **body, **sampling, "return_token_ids": True}
        pause, reason = self.first_pause_s, ""
        for attempt in range(RETRIES):
            if attempt:
                await asyncio.sleep(pause)
                pause *= 2
            if self.dead:  # another request found out meanwhile
                raise EndpointDead(self.dead)
            try:
                response = await self.client.post(f"{self._base}/v1/{route}", json=body)
            except httpx.TransportError as error:
                reason = _describe(error)
                continue
            if response.status_code in _BUSY or response.status_code >= 500:
                reason = _describe(response)
                continue
            if response.status_code in _MISDIRECTED:
                raise EndpointDead(_describe(response))
            if response.is_error:
                raise Refused(_describe(response), final=True)
            return self._read(response)
        if await self._lives():
            raise Refused(f"{reason}, {RETRIES} times", final=False)
        raise EndpointDead(f"{reason}, {RETRIES} times")

    async def _lives(self) -> bool:
        try:
            return (await self.client.get(f"{self._base}/v1/models", timeout=10)).is_success
        except httpx.TransportError:
            return False

    def _read(self, response: httpx.Response) -> Answer:
        try:
            body = response.json()
            choice = body["choices"][0]
            message = choice.get("message") or {"role": "assistant", "content": choice.get("text", "")}
            finish = choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Refused(f"the answer is no OpenAI response ({error!r})", final=False) from error
        # SGLang puts both lists into the choice, vLLM the prompt's beside the choices for chats.
        prompt_ids = choice.get("prompt_token_ids", body.get("prompt_token_ids"))
        response_ids = choice.get("response_token_ids", choice.get("token_ids"))
        if not _are_ids(prompt_ids) or not _are_ids(response_ids):
            raise DataError(
                f"{self.url} answers without token ids (return_token_ids is true in every request); wanted SGLang "
                "0.5.23 or vLLM 0.32.0 or later, because text tokenised again is not what the target generated"
            )
        if finish not in ("stop", "length", "tool_calls", "function_call"):
            raise Refused(f"the answer ended with {finish!r}", final=False)
        return Answer(prompt_ids, response_ids, "length" if finish == "length" else "stop", _history(message))


def _history(message: dict[str, Any]) -> dict[str, Any]:
    """The generated turn as a next request sends it: what the server put out, without its empty fields."""
    kept = ("content", "tool_calls", "reasoning_content")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    fields = {**message, "reasoning_content": reasoning}
    return {"role": "assistant", **{name: fields[name] for name in kept if fields.get(name)}}


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(i) is int for i in ids)


def _describe(failure: httpx.Response | httpx.HTTPError | httpx.InvalidURL) -> str:
    if isinstance(failure, httpx.HTTPStatusError):
        failure = failure.response
    if isinstance(failure, httpx.Response):
        return f"HTTP {failure.status_code}: {' '.join(failure.text.split())[:200]}"
    return f"{type(failure).__name__} {failure}".strip()
