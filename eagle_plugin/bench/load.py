"""An asynchronous OpenAI chat client that streams answers, with bounded concurrency, and measures their times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAIError

from eagle_plugin.bench.engine import Engine, EngineEndpoint
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.stream_fields import Output, StreamFields
from eagle_plugin.common.http_access import api_key, describe_refusal, key_headers

REQUEST_TIMEOUT_S = 600.0
FLUSH_TIMEOUT_S = 10.0  # until no request holds the prefix cache
# For httpx: the servers are on 127.0.0.1 without TLS, and to load the certificates takes longer than a short request.
VERIFY_TLS = False


class LoadError(RuntimeError):
    """A request failed, or its stream did not hold what the measurement needs."""


@dataclass(frozen=True)
class Completion:
    """One streamed answer and its times in seconds.

    Chunks that carry tokens are those with text, reasoning or a part of a tool call; `gaps_s` are the waits between
    them. The number of tokens is the engine's own.
    """

    question_id: str
    output: Output
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    total_s: float
    gaps_s: tuple[float, ...]
    verify_rounds: int | None  # of this request, those without drafts included; None if the engine reports none
    # Rounds that accepted exactly 0, 1, 2, ... drafts, as the engine counts them; empty if it reports none.
    accepted_drafts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sampling:
    """How to decode: greedy unless a temperature is given, the same for every request of a run."""

    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int | None = None


async def stream_chat(
    client: AsyncOpenAI,
    engine: Engine,
    model: str,
    question: Question,
    sampling: Sampling,
    on_text: Callable[[str], None] = lambda piece: None,
    on_tokens: Callable[[int], None] | None = None,
) -> Completion:
    """Ask one question and time the stream. Raises LoadError.

    `on_text` gets every piece of text, reasoning or a tool call when it arrives. `on_tokens`, if given, gets the number
    of tokens so far: the engine is then asked to report it with every chunk.
    """
    fields = StreamFields()
    arrivals: list[float] = []
    finish_reason, finished, usage, rounds = "", 0.0, None, None
    accepted: tuple[int, ...] = ()
    stream_options: Any = {"include_usage": True} | ({"continuous_usage_stats": True} if on_tokens else {})
    messages: Any = question.messages or [{"role": "user", "content": question.prompt}]
    began = time.perf_counter()
    try:
        stream = await client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            stream=True,
            stream_options=stream_options,
            extra_body={"ignore_eos": sampling.ignore_eos, **engine.request_fields},
        )
        async for chunk in stream:
            now = time.perf_counter()
            usage = chunk.usage or usage
            if on_tokens and chunk.usage:
                on_tokens(chunk.usage.completion_tokens)
            found = engine.verify_rounds(chunk)
            rounds = rounds if found is None else found
            accepted = engine.accepted_drafts(chunk) or accepted
            for choice in chunk.choices:
                if choice.finish_reason:
                    finish_reason, finished = choice.finish_reason, now
                if piece := fields.add(choice.delta):
                    arrivals.append(now)
                    on_text(piece)
    except (OpenAIError, httpx.HTTPError) as error:
        raise LoadError(f"question {question.id!r}: the request to {client.base_url} failed: {error}") from error
    if usage is None or not finish_reason:
        missing = "a finish_reason" if usage else "the usage"
        raise LoadError(
            f"question {question.id!r}: the stream from {client.base_url} ended without {missing}; see the server's log"
        )
    return Completion(
        question_id=question.id,
        output=fields.output,
        finish_reason=finish_reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        ttft_s=(arrivals or [finished])[0] - began,
        total_s=finished - began,
        gaps_s=tuple(later - earlier for earlier, later in zip(arrivals, arrivals[1:], strict=False)),
        verify_rounds=rounds,
        accepted_drafts=accepted,
    )


async def run_load(
    server: EngineEndpoint,
    questions: Sequence[Question],
    sampling: Sampling,
    concurrency: int = 1,
    on_text: Callable[[str], None] = lambda piece: None,
    on_tokens: Callable[[int], None] | None = None,
    on_done: Callable[[Completion], None] = lambda completion: None,
) -> list[Completion]:
    """Ask all questions, at most `concurrency` of them at a time; the answers are in the order of the questions.

    The first failed request ends the run: the others are cancelled and its LoadError is raised.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}, wanted at least 1")
    gate = asyncio.Semaphore(concurrency)
    async with connect(server) as client:
        model = await served_model(client)

        async def ask(question: Question) -> Completion:
            async with gate:
                completion = await stream_chat(client, server.engine, model, question, sampling, on_text, on_tokens)
            on_done(completion)
            return completion

        tasks = [asyncio.ensure_future(ask(question)) for question in questions]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise


def connect(server: EngineEndpoint) -> AsyncOpenAI:
    """A client for one run: a connection that was open during a pause of the server may be closed when used again."""
    return AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key=api_key() or "none",
        default_headers=dict(server.headers),
        max_retries=0,  # a silent second try would be timed as a slow first one
        timeout=REQUEST_TIMEOUT_S,
        http_client=httpx.AsyncClient(
            trust_env=False, timeout=REQUEST_TIMEOUT_S, verify=VERIFY_TLS, limits=httpx.Limits(max_connections=None)
        ),
    )


async def served_model(client: AsyncOpenAI) -> str:
    """The name of the model that the server serves. Raises LoadError."""
    try:
        return (await client.models.list()).data[0].id
    except (OpenAIError, httpx.HTTPError, IndexError) as error:
        raise LoadError(f"{client.base_url} does not name a model at /models: {error}") from error


def ask_all(
    server: EngineEndpoint, questions: Sequence[Question], sampling: Sampling, **options: Any
) -> list[Completion]:
    """`run_load` for callers without an event loop; it takes the same options."""
    return asyncio.run(run_load(server, questions, sampling, **options))


def accept_length(completions: Iterable[Completion]) -> float | None:
    """Mean accept length with the bonus token: tokens that rounds delivered / rounds; a plain round delivers one.

    The first token of an answer comes from the prefill and is not counted; tokens cut off by `max_tokens` or a stop
    string were not delivered and are not counted either. None if no request reported verify rounds.
    """
    speculative = [completion for completion in completions if completion.verify_rounds]
    rounds = sum(completion.verify_rounds or 0 for completion in speculative)
    tokens = sum(completion.completion_tokens - 1 for completion in speculative)
    return tokens / rounds if rounds else None


def flush_prefix_cache(server: EngineEndpoint) -> None:
    """Empty the engine's prefix cache, so that later prompts are prefilled in full. Raises LoadError."""
    until = time.monotonic() + FLUSH_TIMEOUT_S
    with _client(server) as client:
        try:
            while not server.engine.flush(client):
                if time.monotonic() > until:
                    raise LoadError(f"{server.url}: requests still hold the prefix cache after {FLUSH_TIMEOUT_S:.0f} s")
                time.sleep(0.05)
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise LoadError(f"{server.url}: the prefix cache was not emptied: {describe_refusal(error)}") from error


def engine_version(server: EngineEndpoint) -> str:
    """The version that the running engine reports about itself. Raises LoadError."""
    path = server.engine.version_path
    with _client(server) as client:
        try:
            return str(client.get(path).raise_for_status().json()["version"])
        except (httpx.HTTPError, KeyError, ValueError) as error:
            reason = describe_refusal(error)
            raise LoadError(f"{server.url}{path} does not return the engine's version: {reason}") from error


def _client(server: EngineEndpoint) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers=key_headers(), timeout=30, trust_env=False, verify=VERIFY_TLS)
