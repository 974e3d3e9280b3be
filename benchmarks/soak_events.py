"""What happens to the server of benchmarks/soak.py while its requests run: other heads, pauses, weights."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.soak_checks import REQUEST_SECONDS
from eagle_plugin.bench.servers import Server
from eagle_plugin.learning.deploy.server import ServedHead

TARGET, HEAD, OTHER_HEAD, MAILBOX = "target", "head", "other-head", "deploy"  # below the folder of the models
PAUSED_SECONDS = 0.3
# The ways in which requests are held, and how a pause ends.
PAUSES = {
    "sglang": ("pause_generation", ({"mode": "in_place"}, {"mode": "retract"}), "continue_generation"),
    "vllm": ("pause", ({"mode": "keep"}, {"mode": "wait"}), "resume"),
}


class Events:
    """Each call of `happen` makes the next few of them, and counts them by name."""

    def __init__(self, server: Server, engine: str, models: Path) -> None:
        self._server, self._engine, self._models = server, engine, models
        self._head = ServedHead(models / MAILBOX, server.url)
        self.made: Counter[str] = Counter()

    async def happen(self) -> None:
        """Another head, pauses and weights, and all as it was. Raises HTTPError, DeployError."""
        route, ways, end = PAUSES[self._engine]
        events: Sequence[tuple[str, Callable[[], Awaitable[None]]]] = (
            ("head", lambda: self._exchange(OTHER_HEAD)),
            *((f"{route} {way['mode']}", lambda way=way: self._pause(route, way, end)) for way in ways),
            ("head", lambda: self._exchange(HEAD)),
            *([("weights", self._update_weights)] if self._engine == "sglang" else []),
        )
        for name, event in events:
            await asyncio.sleep(0.5)
            await event()
            self.made[name] += 1

    async def _exchange(self, name: str) -> None:
        await asyncio.to_thread(self._head.exchange, self._models / name)

    async def _pause(self, route: str, way: dict[str, str], end: str) -> None:
        await self._post(route, **({"params": way} if self._engine == "vllm" else {"json": way}))
        await asyncio.sleep(PAUSED_SECONDS)
        await self._post(end, json={})

    async def _update_weights(self) -> None:
        """The same weights once more, while requests are held: their cache is that of the old ones."""
        await self._post("pause_generation", json={"mode": "retract"})
        await self._post("update_weights_from_disk", json={"model_path": str(self._models / TARGET)})
        await self._post("continue_generation", json={})

    async def _post(self, route: str, **body: Any) -> None:
        async with httpx.AsyncClient(base_url=self._server.url, timeout=REQUEST_SECONDS, trust_env=False) as client:
            (await client.post(f"/{route}", **body)).raise_for_status()
