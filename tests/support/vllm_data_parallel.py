"""vLLM servers of several engines (--data-parallel-size), each in a process of its own, led from the test's."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM
from vllm_engines import DEFAULTS

from eagle_plugin.common.metric_registry import PREFIX
from eagle_plugin.policy.metric_table import TOTALS, VERIFY_ROUNDS

SECONDS = 300  # engines that wait for each other never answer; these take seconds on a busy machine
_names = itertools.count()


class Ask(NamedTuple):
    """A request to one engine."""

    engine: int
    prompt: list[int]
    tokens: int
    sampling: dict[str, Any] = {}  # noqa: RUF012


class Engines:
    """A server of several engines, and the loop of its requests."""

    def __init__(self, llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
        self._llm, self._loop = llm, loop

    def answer(self, asked: Sequence[Ask]) -> list[list[int]]:
        """The tokens that answer requests, all sent at once."""
        return self._loop.run_until_complete(asyncio.wait_for(self._answer(asked), SECONDS))

    def call(self, function: str, *arguments: Any) -> list[Any]:
        """What a method of the workers returns, in each of them."""
        return self._loop.run_until_complete(self._llm.collective_rpc(function, args=arguments))

    async def _answer(self, asked: Sequence[Ask]) -> list[list[int]]:
        return await asyncio.gather(*[self._one(one) for one in asked])

    async def _one(self, asked: Ask) -> list[int]:
        common = {"temperature": 0.0, "max_tokens": asked.tokens, "ignore_eos": True, "detokenize": False}
        answers = self._llm.generate(
            TokensPrompt(prompt_token_ids=asked.prompt),
            SamplingParams(**common | asked.sampling),
            f"request {next(_names)}",
            data_parallel_rank=asked.engine,
        )
        tokens: list[int] = []
        async for answer in answers:
            tokens = list(answer.outputs[0].token_ids)
        return tokens


@contextmanager
def engines(
    target: Path, head: Path | None, *, policy: str = "fixed", plugin: dict[str, Any] | None = None, **options: Any
) -> Iterator[Engines]:
    """Two engines with draft trees, or plain ones without a head; options as of `vllm_engines.engine`."""
    if head is not None:
        options |= {
            "speculative_config": {"method": "eagle3", "model": str(head), "num_speculative_tokens": 7},
            "additional_config": {"eagle_plugin": {"depth": 3, "topk": 2} | (plugin or {})},
        }
    loop = asyncio.new_event_loop()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("EAGLE_PLUGIN", "1")
        patched.setenv("EAGLE_POLICY", policy)
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(model=str(target), **DEFAULTS | {"data_parallel_size": 2} | options)
        )
        try:
            yield Engines(llm, loop)
        finally:
            llm.shutdown()
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


def rounds_of(engine: int) -> dict[str, float]:
    """What the server's metrics say of an engine: the trees that it verified and, as its worker reports it, the rounds
    of each shape."""
    found = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.labels.get("engine") == str(engine):
                if sample.name == f"{PREFIX}{VERIFY_ROUNDS.exported}":
                    found["verified"] = sample.value
                elif sample.name == f"{PREFIX}{TOTALS['rounds'].exported}":
                    found[sample.labels["shape"]] = sample.value
    return found
