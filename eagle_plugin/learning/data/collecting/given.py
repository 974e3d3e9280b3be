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
from eagle_plugin.learning.data.rows import TokenRow

PAUSE_S = 0.1  # between two looks whether documents have come


async def collect_given(
    rows: Iterable[TokenRow],
    urls: Sequence[str],
    settings: GenerationSettings,
    store: GrowingStore,
    console: Console,
    told: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Ask the servers for all rows, `settings.concurrency` at a time per server; why some were refused, by row id.

    A server is asked for no more than its queue holds (`room.Room`) until the documents are in `store`. told: is called
    after every row.

    Raises:
        DataError: no server answers, or all have stopped answering.
    """
    refused: dict[str, str] = {}
    room, manifest = Room(), store.manifest

    async def look() -> None:
        while True:
            await asyncio.sleep(PAUSE_S)
            room.came(await asyncio.to_thread(store.look))
            room.forget_lost()

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
                told()

        def kept() -> str:
            return "start a server with EAGLE_FEATURES and run the same command again: what is in the store is kept"

        looking = asyncio.ensure_future(look())
        try:
            await work_through(endpoints, work, settings.concurrency, lambda: bool(returned), kept)
        finally:
            looking.cancel()
    return refused


def _next(left: Iterator[TokenRow], returned: list[TokenRow]) -> TokenRow | None:
    return returned.pop() if returned else next(left, None)
