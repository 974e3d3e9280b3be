"""Requests to one OpenAI-compatible server that returns token ids, with retries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from eagle_plugin.collect.settings import COLLECTS_HEADER, QUEUE_HEADER
from eagle_plugin.common.http_access import describe_refusal
from eagle_plugin.common.url_credentials import without_credentials
from eagle_plugin.learning.data.generation.waiting import PATIENCE_S, Pause, asks_to_wait
from eagle_plugin.learning.data.rows import DataError

RETRIES = 5
LATE_TRIES = 2  # of a request that takes too long: every try begins the answer anew, and takes as long
FIRST_PAUSE_S = 0.5  # doubled after every failure
LISTING_S = 8.0  # for the list of models, which needs no model to compute
FIRST_TOKEN_S = 120.0  # for the first answer, of one token; a server that is busy may let it wait
_TIMED_OUT = 408  # retried, like every 5xx
_MISDIRECTED = (401, 403, 404, 405)  # the URL or the model name is wrong, not the prompt


FIELD = "eagle_plugin"  # of a request


def asking_for_features(
    id: str,
    source: str,
    split: str,
    given: int | None = None,
    drafts: bool = True,
    earlier: Sequence[tuple[int, int]] = (),
) -> dict[str, Any]:
    """What a request has for the server to store its hidden states as a document (docs/serving.md).

    given: tokens of the prompt before an answer that is given with it. drafts: whether it has drafts. earlier: begin
    and end of answers before that one.
    """
    features: dict[str, Any] = {"id": id, "source": source, "split": split}
    features |= {} if given is None else {"given": given}
    features |= {"earlier": [[*one] for one in earlier]} if earlier else {}
    return {FIELD: {"features": features, **({} if drafts else {"draft": False})}}


def stores_states(response: httpx.Response) -> bool:
    """Whether a server says that it stores the hidden states of what it has answered."""
    return response.headers.get(COLLECTS_HEADER) == "on"


def queue_of(response: httpx.Response) -> int:
    """Bytes of a server's queue of hidden states; 0 if it does not say."""
    found = response.headers.get(QUEUE_HEADER, "")
    return int(found) if found.isdecimal() else 0


class RequestRefused(Exception):
    """The server answers other requests but not this one; the message is the reason."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final  # a later retry would fail too


class EndpointDead(Exception):
    """The server does not answer any more."""


@dataclass(frozen=True)
class GeneratedAnswer:
    """One generated turn."""

    prompt_ids: list[int]  # as the server tokenised the request
    response_ids: list[int]  # with the stop token
    finish: str  # "stop" or "length"
    message: dict[str, Any]  # for the history of the next request

    @property
    def text(self) -> str:
        """All generated text: reasoning, content and the arguments of tool calls."""
        calls = [str(call.get("function", {}).get("arguments", "")) for call in self.message.get("tool_calls") or []]
        parts = [self.message.get("reasoning_content"), self.message.get("content"), *calls]
        return "\n".join(part for part in parts if part)


@dataclass
class TargetEndpoint:
    """One server that serves the target.

    `url` may end in /v1; `client` is closed by the caller.
    """

    url: str
    client: httpx.AsyncClient
    model: str = ""  # empty: the first model that the server lists
    first_pause_s: float = FIRST_PAUSE_S
    dead: str = ""  # why it is not used any more; empty while it is used
    told: Callable[[str], None] = lambda text: None  # once, that the server limits the rate
    collects: bool = False  # whether the server is to store the hidden states of what it is asked
    tries: int = RETRIES  # of a request that fails
    queue_bytes: int = 0  # of hidden states that wait for the server's writer, as it says; 0: it does not
    _base: str = field(init=False)
    _pause: Pause = field(init=False, default_factory=Pause)
    _waited: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._base = self.url.rstrip("/").removesuffix("/v1")

    @property
    def name(self) -> str:
        """The URL as it is shown: without credentials."""
        return without_credentials(self.url)

    @property
    def model_name(self) -> str:
        """The last part of the model's path or name: the folder can be another one on each machine."""
        return self.model.rstrip("/").rpartition("/")[2]

    async def open(self) -> None:
        """Get the name of the model and check that answers have token ids.

        Raises:
            EndpointDead: the server cannot be reached or does not know the model.
            DataError: it answers without token ids.
        """
        try:
            models = await self._send(lambda: self.client.get(f"{self._base}/v1/models", timeout=LISTING_S))
            models.raise_for_status()
            self.model = self.model or str(models.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EndpointDead(describe_refusal(error)) from error
        except (ValueError, LookupError, TypeError) as error:
            raise EndpointDead("/v1/models lists no model; name one with --model") from error
        first: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
        if self.collects:  # an answer of one token is too short to be stored
            first |= asking_for_features("first-request", "", "train")
        try:
            await self._ask("completions", {"prompt": "Hello"}, first, FIRST_TOKEN_S)
        except RequestRefused as error:
            raise EndpointDead(f"it refused a first request: {error}") from error
        except (TimeoutError, asyncio.TimeoutError) as error:  # two classes before Python 3.11
            raise EndpointDead(f"it lists its model, and gave no token within {FIRST_TOKEN_S:g} s") from error

    async def chat(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, sampling: dict[str, Any]
    ) -> GeneratedAnswer:
        """Answer a conversation; raises RequestRefused, EndpointDead or DataError (no token ids)."""
        body = {"messages": messages, "tools": tools} if tools else {"messages": messages}
        return await self._ask("chat/completions", body, sampling)

    async def complete(self, prompt: str | list[int], sampling: dict[str, Any]) -> GeneratedAnswer:
        """Continue a raw prompt; raises like `chat`."""
        return await self._ask("completions", {"prompt": prompt}, sampling)

    async def store_given(
        self,
        id: str,
        source: str,
        split: str,
        ids: list[int],
        prompt: int,
        earlier: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Let the server store the states of prompt and answer, in one prefill; raises like `chat`.

        ids: of both; prompt: how many are the prompt's; earlier: begin and end of answers in it.
        """
        asked = asking_for_features(id, source, split, prompt, earlier=earlier)
        await self.complete(ids, {"max_tokens": 1, "temperature": 0, **asked})

    async def _ask(
        self, route: str, body: dict[str, Any], sampling: dict[str, Any], limit_s: float | None = None
    ) -> GeneratedAnswer:
        body = {"model": self.model, **body, **sampling, "return_token_ids": True}
        pause, reason, tried, late = self.first_pause_s, "", 0, 0
        while tried < self.tries and late < LATE_TRIES:
            if tried:
                await asyncio.sleep(pause)
                pause *= 2
            tried += 1
            try:
                response = await self._send(lambda: self.client.post(f"{self._base}/v1/{route}", json=body), limit_s)
            except httpx.HTTPError as error:  # an answer that cannot be decoded as well
                reason = describe_refusal(error)
                late += isinstance(error, httpx.ReadTimeout)
                continue
            if response.status_code == _TIMED_OUT or response.status_code >= 500:
                reason = describe_refusal(response)
                continue
            if response.status_code in _MISDIRECTED:
                raise EndpointDead(describe_refusal(response))
            if response.is_error:
                raise RequestRefused(describe_refusal(response), final=True)
            if self.collects and not stores_states(response):
                raise EndpointDead(
                    "it does not store hidden states: wanted a server with eagle-plugin, started with EAGLE_FEATURES"
                )
            self.queue_bytes = queue_of(response) if self.collects else 0
            return self._read(response)
        if await self._is_alive():
            fix = "; raise --timeout, or lower --max-tokens" if late and sampling["max_tokens"] > 1 else ""
            raise RequestRefused(f"{reason}, {times(tried)}{fix}", final=False)
        raise EndpointDead(f"{reason}, {times(tried)}")

    async def _send(
        self, request: Callable[[], Awaitable[httpx.Response]], limit_s: float | None = None
    ) -> httpx.Response:
        """The response to a request, which is sent again for as long as the server only asks to wait.

        limit_s: seconds for the response, without the pauses; TimeoutError after them.
        """
        pause = self.first_pause_s
        while True:
            await self._pause.over()
            if self.dead:  # set by another request during this one
                raise EndpointDead(self.dead)
            response = await asyncio.wait_for(request(), limit_s)
            if not asks_to_wait(response):
                self._pause.end()
                return response
            if not self._waited:
                self._waited = True
                self.told(f"{self.name} wants requests later ({describe_refusal(response)}); waiting")
            if not self._pause.lengthen(response, pause):
                raise EndpointDead(f"{describe_refusal(response)}, to every request for {PATIENCE_S / 60:g} minutes")
            pause *= 2

    async def _is_alive(self) -> bool:
        try:
            response = await self.client.get(f"{self._base}/v1/models", timeout=10)
        except httpx.HTTPError:
            return False
        return response.is_success or asks_to_wait(response)

    def _read(self, response: httpx.Response) -> GeneratedAnswer:
        try:
            body = response.json()
            choice = body["choices"][0]
            message = choice.get("message") or {"role": "assistant", "content": choice.get("text", "")}
            finish = choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RequestRefused(f"the answer is no OpenAI response ({error!r})", final=False) from error
        # SGLang puts both lists into the choice; for chats, vLLM puts the prompt's list beside the choices.
        prompt_ids = choice.get("prompt_token_ids", body.get("prompt_token_ids"))
        response_ids = choice.get("response_token_ids", choice.get("token_ids"))
        if not _are_ids(prompt_ids) or not _are_ids(response_ids):
            raise DataError(
                f"{self.url} answers without token ids (return_token_ids is true in every request); wanted a "
                "current SGLang or vLLM, because text tokenised again is not what the target generated"
            )
        if finish not in ("stop", "length", "tool_calls", "function_call"):
            raise RequestRefused(f"the answer ended with {finish!r}", final=False)
        return GeneratedAnswer(prompt_ids, response_ids, "length" if finish == "length" else "stop", _history(message))


def times(tries: int) -> str:
    """How often something was tried."""
    return "once" if tries == 1 else f"{tries} times"


def _history(message: dict[str, Any]) -> dict[str, Any]:
    """The generated turn as the next request sends it: without fields that are empty."""
    kept = ("content", "tool_calls", "reasoning_content")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    fields = {**message, "reasoning_content": reasoning}
    return {"role": "assistant", **{name: fields[name] for name in kept if fields.get(name)}}


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(i) is int for i in ids)
