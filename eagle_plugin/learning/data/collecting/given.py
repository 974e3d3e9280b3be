"""Lets servers store the hidden states of answers that are there already: prompt and answer as one prefill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console

from eagle_plugin.learning.data.collecting.completion import GrowingStore
from eagle_plugin.learning.data.collecting.room import Room, sent_bytes
from eagle_plugin.learning.data.dialogues import answers_of
from eagle_plugin.learning.data.generation.endpoints import (
    EndpointDead,
    RequestRefused,
    TargetEndpoint,
)
from eagle_plugin.learning.data.generation.run import (
    GenerationSettings,
    make_client,
    mark_dead,
    open_endpoints,
    work_through,
)
from eagle_plugin.learning.data.rows import DataError, TokenRow

PAUSE_S = 0.1  # between two looks whether documents have come; twice as long after each that fails
MOST_FAILED = 8  # looks in a row, with the pauses between them 25 s


async def collect_given(
    rows: Iterable[TokenRow],
    urls: Sequence[str],
    settings: GenerationSettings,
    store: GrowingStore,
    console: Console,
    came: Callable[[list[str]], None] = lambda names: None,
) -> dict[str, str]:
    """Ask the servers for all rows, `settings.concurrency` at a time per server; why some were refused, by row id.

    A server is asked for no more than its queue holds (`room.Room`) until the documents are in `store`. came: gets the
    names of documents that have come.

    Raises:
        DataError: no server answers, or all have stopped answering, or the store cannot be read for a while.
    """
    refused: dict[str, str] = {}
    room, manifest = Room(), store.manifest

    async def look() -> None:
        failed = 0
        while True:
            await asyncio.sleep(PAUSE_S * 2**failed)
            try:
                found = await asyncio.to_thread(store.look)
            except DataError:  # a store of others, over a network: workers wait for what comes next
                failed += 1
                if failed == MOST_FAILED:
                    raise
                continue
            failed = 0
            room.came(found)
            room.forget_lost()
            came(found)

    left, returned = iter(rows), list[TokenRow]()
    async with make_client(settings) as client:
        endpoints = await open_endpoints(urls, client, settings, console)

        async def work(endpoint: TargetEndpoint) -> None:
            while not endpoint.dead and (row := _next(left, returned)) is not None:
                ids = (row.prompt_ids + row.response_ids)[: manifest.max_length]
                size = sent_bytes(manifest, len(ids))
                while not room.fits(endpoint.url, endpoint.queue_bytes, size):
                    await asyncio.sleep(PAUSE_S)
                room.ask(row.id, endpoint.url, size)
                try:
                    *earlier, _ = answers_of(row)
                    await endpoint.store_given(row.id, row.source, row.split, ids, len(row.prompt_ids), earlier)
                    room.answered(row.id)
                except EndpointDead as error:
                    room.forget([row.id])
                    returned.append(row)
                    mark_dead(endpoint, str(error), console)
                    return
                except RequestRefused as error:
                    room.forget([row.id])
                    refused[row.id] = str(error)

        def kept() -> str:
            return "start a server with EAGLE_FEATURES and run the same command again: what is in the store is kept"

        asking = work_through(endpoints, work, settings.concurrency, lambda: bool(returned), kept)
        tasks = [asyncio.ensure_future(job) for job in (asking, look())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:  # `look` ends by an error alone
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return refused


def _next(left: Iterator[TokenRow], returned: list[TokenRow]) -> TokenRow | None:
    return returned.pop() if returned else next(left, None)
