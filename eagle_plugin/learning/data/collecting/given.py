"""Lets servers store the hidden states of answers that are there already: prompt and answer as one prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console

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


async def collect_given(
    rows: Iterable[TokenRow],
    urls: Sequence[str],
    settings: GenerationSettings,
    max_length: int,
    console: Console,
    told: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Ask the servers for all rows, `settings.concurrency` at a time per server; why some were refused, by row id.

    max_length: tokens of a document. told: is called after every row.

    Raises:
        DataError: no server answers, or all have stopped answering.
    """
    refused: dict[str, str] = {}
    left, returned = iter(rows), list[TokenRow]()
    async with make_client(settings) as client:
        endpoints = await open_endpoints(urls, client, settings, console)

        async def work(endpoint: TargetEndpoint) -> None:
            while not endpoint.dead and (row := _next(left, returned)) is not None:
                ids = (row.prompt_ids + row.response_ids)[:max_length]
                try:
                    await endpoint.store_given(row.id, row.source, row.split, ids, len(row.prompt_ids))
                except EndpointDead as error:
                    returned.append(row)
                    mark_dead(endpoint, str(error), console)
                    return
                except RequestRefused as error:
                    refused[row.id] = str(error)
                told()

        def kept() -> str:
            return "start a server with EAGLE_FEATURES and run the same command again: what is in the store is kept"

        await work_through(endpoints, work, settings.concurrency, lambda: bool(returned), kept)
    return refused


def _next(left: Iterator[TokenRow], returned: list[TokenRow]) -> TokenRow | None:
    return returned.pop() if returned else next(left, None)
