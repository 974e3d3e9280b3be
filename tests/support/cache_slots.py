"""Counting the KV cache slots of an SGLang server: requests whose clients hang up must give theirs back."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
from serving import generate_all, responses
from word_prompts import WORDS

from eagle_plugin.bench.servers import Server


def check_aborted_requests(server: Server, prompts: list[str], expected: list[str], tokens: int, times: int) -> None:
    """Ask all prompts `times` over, each time beside eight clients that hang up; then no slot may be in use.

    An idle engine counts its slots and ends itself where some are lost; so do we.
    """
    dice = random.Random(3)
    for number in range(times):
        with ThreadPoolExecutor(1) as hanging_up:  # beside the requests that are checked
            aborted = hanging_up.submit(lambda: [abort_one(server, dice, i) for i in range(8)])
            assert responses(generate_all(server, prompts, tokens, at_once=8)) == expected, number
        aborted.result()
    # A request may end before the count is asked for: one of some must be seen.
    seen = any(abort_one(server, dice, i) > 0 for i in range(20))
    assert seen, "requests that run use no slots: the count says nothing"
    flushed = httpx.post(f"{server.url}/flush_cache", params={"timeout": 30}, timeout=60, trust_env=False)
    assert flushed.status_code == 200
    assert any(used_tokens(server) == 0 for _ in _tries(10))  # the engine counts anew when it is idle
    server.check_alive()


def _tries(seconds: float) -> Iterator[None]:
    """Yield five times per second."""
    for _ in range(int(5 * seconds)):
        yield
        time.sleep(0.2)


def used_tokens(server: Server) -> int:
    """Cache slots of running requests, by the engine's own count: neither free nor kept as prefixes."""
    (load,) = httpx.get(f"{server.url}/v1/loads", timeout=60, trust_env=False).json()["loads"]
    return int(load["num_used_tokens"])


def abort_one(server: Server, dice: random.Random, number: int) -> int:
    """Open a stream and hang up after a few chunks; returns the slots used before that."""
    body = {"text": WORDS[number:] * 3, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}, "stream": True}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60, trust_env=False) as response:
        last = dice.randint(0, 6)
        for chunk, _ in enumerate(response.iter_lines()):
            if chunk >= last:
                return used_tokens(server)
    return 0
