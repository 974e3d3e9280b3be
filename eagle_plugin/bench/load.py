"""An asynchronous OpenAI chat client that streams, with bounded concurrency, and times what it receives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAIError

from eagle_plugin.bench.engine import Endpoint, Engine
from eagle_plugin.bench.prompts import Prompt

REQUEST_TIMEOUT_S = 600.0


class LoadError(RuntimeError):
    """A request failed, or its stream did not hold what the measurement needs."""


@dataclass(frozen=True)
class Completion:
    """One streamed answer and its times in seconds; `gaps_s` are the waits between chunks that carried text."""

    prompt_id: str
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    total_s: float
    gaps_s: tuple[float, ...]
    verify_rounds: int | None  # speculative rounds of this request; None where the engine reports none

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first: (end - first chunk) / (tokens - 1), 0 for one token."""
        return (self.total_s - self.ttft_s) / (self.completion_tokens - 1) if self.completion_tokens > 1 else 0.0


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
    prompt: Prompt,
    sampling: Sampling,
    on_text: Callable[[str], None] = lambda piece: None,
) -> Completion:
    """Ask one question and time the stream; `on_text` gets every piece of text as it arrives. Raises LoadError."""
    pieces: list[str] = []
    arrivals: list[float] = []
    finish_reason, finished, usage, rounds = "", 0.0, None, None
    began = time.perf_counter()
    try:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt.prompt}],
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": sampling.ignore_eos, **engine.request_fields},
        )
        async for chunk in stream:
            now = time.perf_counter()
            usage = chunk.usage or usage
            rounds = engine.verify_rounds(chunk) or rounds
            for choice in chunk.choices:
                if choice.finish_reason:
                    finish_reason, finished = choice.finish_reason, now
                if choice.delta.content:
                    pieces.append(choice.delta.content)
                    arrivals.append(now)
                    on_text(choice.delta.content)
    except (OpenAIError, httpx.HTTPError) as error:
        raise LoadError(f"prompt {prompt.id!r}: the request to {client.base_url} failed: {error}") from error
    if usage is None or not finish_reason:
        missing = "a finish_reason" if usage else "the usage"
        raise LoadError(
            f"prompt {prompt.id!r}: the stream from {client.base_url} ended without {missing}; see the server's log"
        )
    return Completion(
        prompt_id=prompt.id,
        text="".join(pieces),
        finish_reason=finish_reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        ttft_s=(arrivals or [finished])[0] - began,
        total_s=finished - began,
        gaps_s=tuple(later - earlier for earlier, later in zip(arrivals, arrivals[1:], strict=False)),
        verify_rounds=rounds,
    )


async def run_load(
    server: Endpoint,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    concurrency: int = 1,
    on_text: Callable[[str], None] = lambda piece: None,
    on_done: Callable[[Completion], None] = lambda completion: None,
) -> list[Completion]:
    """Ask all prompts with at most `concurrency` of them under way; answers come back in the prompts' order.

    The first failed request ends the run: the others are cancelled and its LoadError is raised.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}, wanted at least 1")
    gate = asyncio.Semaphore(concurrency)
    # A client for each run: a connection kept over a pause of the server may be closed the moment it is used again.
    async with AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,  # a silent second try would be timed as a slow first one
        timeout=REQUEST_TIMEOUT_S,
        http_client=httpx.AsyncClient(trust_env=False, timeout=REQUEST_TIMEOUT_S),
    ) as client:
        model = await _served_model(client)

        async def ask(prompt: Prompt) -> Completion:
            async with gate:
                completion = await stream_chat(client, server.engine, model, prompt, sampling, on_text)
            on_done(completion)
            return completion

        tasks = [asyncio.ensure_future(ask(prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise


async def _served_model(client: AsyncOpenAI) -> str:
    try:
        return (await client.models.list()).data[0].id
    except (OpenAIError, httpx.HTTPError, IndexError) as error:
        raise LoadError(f"{client.base_url} does not name a model at /models: {error}") from error


def ask_all(server: Endpoint, prompts: Sequence[Prompt], sampling: Sampling, **options: Any) -> list[Completion]:
    """`run_load` for callers without an event loop; takes its options too."""
    return asyncio.run(run_load(server, prompts, sampling, **options))


def accept_length(completions: Iterable[Completion]) -> float | None:
    """Mean accept length with the bonus token: tokens that verify rounds delivered / verify rounds.

    The first token of an answer comes from the prefill and is not counted; tokens cut off by `max_tokens` or a stop
    string were not delivered and are not counted either. None where no request reported verify rounds.
    """
    speculative = [completion for completion in completions if completion.verify_rounds]
    rounds = sum(completion.verify_rounds or 0 for completion in speculative)
    tokens = sum(completion.completion_tokens - 1 for completion in speculative)
    return tokens / rounds if rounds else None


def flush_prefix_cache(server: Endpoint, timeout_s: float = 10.0) -> None:
    """Empty the engine's prefix cache, so that the prompts which follow are prefilled in full. Raises LoadError."""
    until = time.monotonic() + timeout_s
    with _client(server) as client:
        try:
            while not server.engine.flush(client):
                if time.monotonic() > until:
                    raise LoadError(f"{server.url}: requests still hold the prefix cache after {timeout_s:.0f} s")
                time.sleep(0.05)
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise LoadError(f"{server.url}: the prefix cache was not emptied: {error}") from error


def engine_version(server: Endpoint) -> str:
    """The version that the running engine reports about itself. Raises LoadError."""
    path = server.engine.version_path
    with _client(server) as client:
        try:
            return str(client.get(path).raise_for_status().json()["version"])
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise LoadError(f"{server.url}{path} does not tell the engine's version: {error}") from error


def _client(server: Endpoint) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=30, trust_env=False)
