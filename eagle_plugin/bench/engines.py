"""The engines that the bench knows, by name."""

from __future__ import annotations

from eagle_plugin.bench import sglang_server, vllm_server
from eagle_plugin.bench.engine import Engine

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (sglang_server.ENGINE, vllm_server.ENGINE)}
