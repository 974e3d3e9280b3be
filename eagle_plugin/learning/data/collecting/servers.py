"""Servers with `EAGLE_FEATURES`, asked by several threads for as long as a training run takes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import httpx
from rich.console import Console
from rich.markup import escape

from eagle_plugin.learning.data.collecting.room import SHARE, Room
from eagle_plugin.learning.data.generation.endpoints import (
    EndpointDead,
    RequestRefused,
    TargetEndpoint,
)
from eagle_plugin.learning.data.generation.run import GenerationSettings, make_client, open_endpoints, run_all
from eagle_plugin.learning.data.rows import DataError

T = TypeVar("T")
REOPEN_S = 5.0  # between two tries of a server that has stopped answering
MOST_FAULTS = 3
PATIENCE_S = 600.0  # without any server
LOST_S = 1.0  # between two looks for documents that were lost, while no server has room


class Asked(NamedTuple):
    """One document that a server is to store: what `TargetEndpoint.store_given` takes."""

    id: str
    source: str
    split: str
    ids: list[int]  # prompt and answer
    prompt: int  # tokens of the prompt
    size: int = 0  # bytes in a server's queue, of `room.sent_bytes`


class FeatureServers:
    """Gives each request to the server that has the fewest. One that stops answering is tried again every few seconds.

    A server is asked for no more than its queue holds until `came` says what is in the store (`room.Room`).

    Raises:
        DataError: none answers.
        UserError: the key or the certificates of the environment cannot be used.
    """

    def __init__(
        self, urls: Sequence[str], settings: GenerationSettings, console: Console, share: float = SHARE
    ) -> None:
        """share: of a server's queue, for this process."""
        self._settings, self._console, self._room = settings, console, Room(share)
        self._lock, self._closed = threading.Lock(), False
        self._client: httpx.AsyncClient | None = None  # until `_open` has made it
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="feature-servers", daemon=True)
        self._thread.start()
        self._busy: Counter[str] = Counter()  # requests by URL
        self._reopening: set[asyncio.Task[None]] = set()
        self._why: dict[str, str] = {}  # name of a server -> why it does not answer
        try:
            self._run(self._open(urls))
        except BaseException:
            self.close()
            raise

    def ask(self, documents: Sequence[Asked]) -> None:
        """Have all of them computed; a document comes into the store a little later than its answer.

        Raises:
            DataError: a server refuses one, or none has answered for `PATIENCE_S`.
        """
        self._run(self._ask_all(documents))

    def came(self, names: Iterable[str]) -> None:
        """Documents are in the store: servers have room for others."""
        self._tell(self._room.came, names)

    def forget(self, names: Iterable[str]) -> None:
        """Documents that do not come."""
        self._tell(self._room.forget, names)

    def _tell(self, call: Callable[[list[str]], None], names: Iterable[str]) -> None:
        def tell(names: list[str]) -> None:
            call(names)
            self._freed.set()

        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(tell, [*names])

    def close(self) -> None:
        """Forget requests that are on their way."""
        with self._lock:  # what was given to the loop before is cancelled, and nothing comes after
            self._closed = True
            ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        ended.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, job: Coroutine[None, None, T]) -> T:
        with self._lock:
            if self._closed:
                job.close()
                raise DataError("the servers are not asked any more")
            future = asyncio.run_coroutine_threadsafe(job, self._loop)
        return future.result()

    async def _open(self, urls: Sequence[str]) -> None:
        self._client = client = make_client(self._settings)
        self._some, self._freed = asyncio.Event(), asyncio.Event()
        self._slots = asyncio.Semaphore(self._settings.concurrency * len(urls))
        endpoints = await open_endpoints(urls, client, self._settings, self._console)
        self._alive = [endpoint for endpoint in endpoints if not endpoint.dead]
        for endpoint in endpoints:
            if endpoint.dead:
                self._reopen_later(endpoint, endpoint.dead)
        if not self._alive:
            reasons = self._reasons()
            raise DataError(f"no server of data.online answers ({reasons}); start one, or correct data.online.servers")
        self._some.set()

    async def _ask_all(self, documents: Sequence[Asked]) -> None:
        await run_all([self._ask(document) for document in documents])

    async def _ask(self, document: Asked) -> None:
        faults = 0  # of servers that answer something else, but not this
        async with self._slots:
            while True:
                endpoint = await self._choose(document.size)
                self._busy[endpoint.url] += 1
                self._room.ask(document.id, endpoint.url, document.size)
                try:
                    await endpoint.store_given(*document[:-1])
                    self._room.answered(document.id)
                    return
                except EndpointDead as error:
                    self._room.forget([document.id])
                    self._reopen_later(endpoint, str(error))
                except RequestRefused as error:
                    self._room.forget([document.id])
                    faults += 1
                    if error.final:
                        raise DataError(
                            f"{endpoint.name} refuses a row of {len(document.ids):,} tokens ({error}); give the server "
                            "a longer context, or a smaller EAGLE_FEATURES_MAX_LENGTH"
                        ) from error
                    if faults == MOST_FAULTS:
                        raise DataError(
                            f"{endpoint.name} fails at a row of {len(document.ids):,} tokens ({error}), as servers did "
                            f"{faults} times; see its log"
                        ) from error
                    self._reopen_later(endpoint, str(error))  # it may hang: others go on
                finally:
                    self._busy[endpoint.url] -= 1

    async def _choose(self, size: int) -> TargetEndpoint:
        """The server with the fewest requests among those that have room for a document."""
        while True:
            await self._wait_for_some()
            fits = [one for one in self._alive if self._room.fits(one.url, one.queue_bytes, size)]
            if fits:
                return min(fits, key=lambda endpoint: self._busy[endpoint.url])
            self._freed.clear()
            try:
                await asyncio.wait_for(self._freed.wait(), LOST_S)
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                self._room.forget_lost()

    async def _wait_for_some(self) -> None:
        try:
            await asyncio.wait_for(self._some.wait(), PATIENCE_S)
        except (TimeoutError, asyncio.TimeoutError) as error:  # two classes before Python 3.11
            raise DataError(
                f"no server of data.online has answered for {PATIENCE_S:g} s ({self._reasons()}); start one and run "
                "the same command again: it continues from the last checkpoint"
            ) from error

    def _reasons(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self._why.items())

    def _reopen_later(self, endpoint: TargetEndpoint, reason: str) -> None:
        if endpoint in self._alive:
            self._alive.remove(endpoint)
            self._console.print(f"[yellow]waiting for[/] {escape(endpoint.name)} ({escape(reason)})")
        elif endpoint.name in self._why:  # another of its requests was first
            return
        self._why[endpoint.name] = endpoint.dead = reason
        self._room.forget_server(endpoint.url)
        self._freed.set()
        if not self._alive:
            self._some.clear()
        task = asyncio.ensure_future(self._reopen(endpoint))
        self._reopening.add(task)
        task.add_done_callback(self._reopening.discard)

    async def _reopen(self, endpoint: TargetEndpoint) -> None:
        while True:
            await asyncio.sleep(REOPEN_S)
            again = replace(endpoint, dead="")
            try:
                await again.open()
            except (EndpointDead, DataError) as error:
                self._why[endpoint.name] = str(error)
                continue
            self._console.print(f"{escape(endpoint.name)} answers again")
            del self._why[endpoint.name]
            self._alive.append(again)
            self._some.set()
            self._freed.set()
            return

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()
