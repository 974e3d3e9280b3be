"""A generation run: many rollouts at the same time, over several endpoints."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from eagle_plugin.common.http_access import key_headers, tls_context
from eagle_plugin.common.progress import ProgressBars, report_progress
from eagle_plugin.learning.data.generation.endpoints import (
    FIRST_PAUSE_S,
    RETRIES,
    EndpointDead,
    RequestRefused,
    TargetEndpoint,
)
from eagle_plugin.learning.data.generation.journal import Journal
from eagle_plugin.learning.data.generation.rollout import Rollout, assign_temperature, run_rollout
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.sources.prompts import Prompt, read_prompts

CONNECT_TIMEOUT_S = 10.0
SHORTEST_LIMIT_S, SLOWEST_RATE = 600.0, 10.0  # of a request: seconds, and tokens per second


@dataclass(frozen=True)
class GenerationSettings:
    """How the target is asked."""

    max_tokens: int = 192  # per answer
    temperatures: Sequence[float] | None = None  # see `assign_temperature`
    concurrency: int = 64  # requests in flight per endpoint
    timeout_s: float | None = None  # per request; default: `longest_wait` of its tokens
    model: str = ""  # empty: the first model that each server lists
    is_private: Callable[[str], bool] | None = None  # answers for which it returns true are dropped
    first_pause_s: float = FIRST_PAUSE_S
    tries: int = RETRIES  # of a request that fails, at one server
    collects: bool = False  # whether the servers store the hidden states of the answers
    drafts: bool = True  # whether they draft then


@dataclass
class GenerationStats:
    """Counts of one run, for the table at its end."""

    rows: Counter[tuple[str, float | None, str]] = field(default_factory=Counter)  # by source, temperature, finish
    skipped: Counter[str] = field(default_factory=Counter)  # by kind
    reasons: dict[str, str] = field(default_factory=dict)  # one example per kind
    prompt_tokens: int = 0
    response_tokens: int = 0
    postponed: int = 0  # prompts that failed and that the next run asks again
    seconds: float = 0.0

    def add(self, rollout: Rollout) -> None:
        """Count one conversation."""
        for row in rollout.rows:
            self.rows[row.source, row.temperature, row.finish] += 1
            self.prompt_tokens += len(row.prompt_ids)
            self.response_tokens += len(row.response_ids)
        if rollout.skip:
            self.skip(rollout.skip.kind, rollout.skip.reason)

    def skip(self, kind: str, reason: str) -> None:
        """Count a turn without a row."""
        self.skipped[kind] += 1
        self.reasons.setdefault(kind, reason)


class PromptQueue:
    """The prompts that have no rows yet, read from the file when they are needed.

    Ordered by temperature, then as in the file: servers are slower on batches that mix greedy and sampled requests.
    """

    def __init__(self, path: Path, done: set[str], temperatures: Sequence[float] | None) -> None:
        self._path, self._temperatures = path, temperatures
        self._done = frozenset(done)
        ids: set[str] = set()
        assigned: set[float] = set()
        for prompt in read_prompts(path):
            if prompt.id in ids:
                raise DataError(f"{path} has two prompts with the id {prompt.id!r}; wanted one: give each its own id")
            ids.add(prompt.id)
            assigned.add(assign_temperature(prompt, temperatures))
        if not ids:
            raise DataError(f"{path} has no prompts; give the file that `eagle-plugin data prepare` wrote")
        self.total, self.left = len(ids), len(ids - done)
        self._returned: list[tuple[Prompt, float]] = []
        self._fresh = self._read(sorted(assigned))

    def take(self) -> tuple[Prompt, float] | None:
        """The next prompt and its temperature; None if there is none at the moment."""
        return self._returned.pop() if self._returned else next(self._fresh, None)

    def give_back(self, prompt: Prompt, temperature: float) -> None:
        """Return a prompt that another endpoint must answer."""
        self._returned.append((prompt, temperature))

    @property
    def has_returned(self) -> bool:
        """Whether prompts were given back and not taken again."""
        return bool(self._returned)

    def _read(self, assigned: list[float]) -> Iterator[tuple[Prompt, float]]:
        for temperature in assigned:
            for prompt in read_prompts(self._path):
                if prompt.id not in self._done and assign_temperature(prompt, self._temperatures) == temperature:
                    yield prompt, temperature


async def generate(
    prompts: Path, urls: Sequence[str], journal: Journal, settings: GenerationSettings, console: Console
) -> tuple[GenerationStats, list[TargetEndpoint]]:
    """Run a rollout for every prompt that the journal does not have; returns the counts and all endpoints.

    An endpoint that stops answering is not used any more (its `dead` says why), and its prompts go to the others.

    Raises:
        DataError: no endpoint answers, all have stopped answering, or one returns no token ids.
    """
    queue = PromptQueue(prompts, journal.done, settings.temperatures)
    stats, start = GenerationStats(), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} prompts"))
    if not queue.left:
        return stats, []
    async with make_client(settings) as client:
        endpoints = await open_endpoints(urls, client, settings, console)
        for endpoint in [one for one in endpoints if not one.dead][:1]:
            journal.continue_with(endpoint.model_name)
        with ProgressBars(*columns, TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task("generating", total=queue.total, completed=queue.total - queue.left, rate="")

            async def work(endpoint: TargetEndpoint) -> None:
                while not endpoint.dead and (item := queue.take()):
                    prompt, temperature = item
                    try:
                        rollout = await run_rollout(
                            prompt,
                            endpoint,
                            temperature=temperature,
                            max_tokens=settings.max_tokens,
                            is_private=settings.is_private,
                            collects=settings.collects,
                            drafts=settings.drafts,
                        )
                    except EndpointDead as error:
                        queue.give_back(prompt, temperature)
                        mark_dead(endpoint, str(error), console)
                        return
                    except RequestRefused as error:
                        stats.postponed += 1
                        stats.skip("failed for now", str(error))
                        continue
                    if rollout.rows:
                        journal.append(rollout.rows)
                    if rollout.skip:
                        journal.skip(prompt.id, rollout.skip.turn, rollout.skip.reason)
                    stats.add(rollout)
                    rate = stats.response_tokens / (time.monotonic() - start)
                    bar.update(task, advance=1, rate=f"{rate:,.0f} tokens/s")
                    report_progress(bar.tasks[task].completed, queue.total, "prompts")

            def kept() -> str:
                rows = sum(stats.rows.values())
                return f"{rows} new rows are in {journal.out}: start a server and run the same command again"

            await work_through(endpoints, work, settings.concurrency, lambda: queue.has_returned, kept)
    stats.seconds = time.monotonic() - start
    return stats, endpoints


async def open_endpoints(
    urls: Sequence[str], client: httpx.AsyncClient, settings: GenerationSettings, console: Console
) -> list[TargetEndpoint]:
    """The servers, each asked for one token; those that do not answer are marked as dead.

    Raises:
        DataError: they serve different models, or one returns no token ids.
    """
    endpoints = [
        TargetEndpoint(
            url,
            client,
            settings.model,
            settings.first_pause_s,
            collects=settings.collects,
            tries=settings.tries,
            told=lambda text: console.print(escape(text), highlight=False),
        )
        for url in urls
    ]
    names = ", ".join(escape(endpoint.name) for endpoint in endpoints)
    console.print(f"asking {names} for one token", highlight=False)
    await asyncio.gather(*(_open(endpoint, console) for endpoint in endpoints))
    _refuse_two_models([endpoint for endpoint in endpoints if not endpoint.dead])
    return endpoints


def _refuse_two_models(endpoints: Sequence[TargetEndpoint]) -> None:
    for other in endpoints[1:]:
        if other.model_name != endpoints[0].model_name:
            raise DataError(
                f"{endpoints[0].name} serves the model {endpoints[0].model} and {other.name} {other.model}, wanted one "
                "target; leave one out, or name the model of all with --model or with their --served-model-name"
            )


def longest_wait(max_tokens: int) -> float:
    """The seconds that a request of so many tokens may take: a server under load writes 10 per second and more."""
    return max(SHORTEST_LIMIT_S, max_tokens / SLOWEST_RATE)


def make_client(settings: GenerationSettings) -> httpx.AsyncClient:
    """The client of all requests of a run.

    Raises:
        UserError: the key or the certificates of the environment cannot be used.
    """
    limit_s = longest_wait(settings.max_tokens) if settings.timeout_s is None else settings.timeout_s
    timeout = httpx.Timeout(limit_s, connect=CONNECT_TIMEOUT_S)
    transport = _Transport(verify=tls_context(), limits=httpx.Limits(max_connections=None), trust_env=False)
    return httpx.AsyncClient(timeout=timeout, transport=transport, headers=key_headers(), trust_env=False)


class _Transport(httpx.AsyncHTTPTransport):
    """httpx's own, which also names a connection that its server ends as soon as it is made."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:  # anyio asks the socket that is gone already for the name of its peer
            raise httpx.ConnectError("the server ended the connection at once", request=request) from error


async def _open(endpoint: TargetEndpoint, console: Console) -> None:
    try:
        await endpoint.open()
    except EndpointDead as error:
        mark_dead(endpoint, str(error), console)


def mark_dead(endpoint: TargetEndpoint, reason: str, console: Console) -> None:
    if not endpoint.dead:
        endpoint.dead = reason
        console.print(f"[yellow]left out:[/] {escape(endpoint.name)} ({escape(reason)})")


async def work_through(
    endpoints: Sequence[TargetEndpoint],
    work: Callable[[TargetEndpoint], Coroutine[None, None, None]],
    concurrency: int,
    has_returned: Callable[[], bool],
    kept: Callable[[], str],
) -> None:
    """Let every endpoint that answers run `work` so many times at once, until none has given work back.

    kept: what becomes of the work done so far, for the error.

    Raises:
        DataError: all endpoints have stopped answering.
    """
    while True:
        alive = [endpoint for endpoint in endpoints if not endpoint.dead]
        if not alive:
            why = "; ".join(f"{endpoint.name}: {endpoint.dead}" for endpoint in endpoints)
            raise DataError(f"no endpoint answers ({why}); {kept()}")
        await run_all([work(endpoint) for endpoint in alive for _ in range(concurrency)])
        if not has_returned():
            return


async def run_all(jobs: Sequence[Coroutine[None, None, None]]) -> None:
    """Run the jobs concurrently; the first error cancels the others."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
