"""The requests of benchmarks/soak.py: a stream over what an API takes, made from a seed and a number alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

TOKENS = range(3, 280)  # of the tiny target's vocabulary
PREFIXES = 12  # prompts that others begin like
LONGEST_PROMPT, LONGEST_ANSWER = 200, 96
ADAPTER = "twist"  # a LoRA adapter of SGLang's server; vLLM's CPU kernels give one to the whole batch
AT_ONCE = (1, 4, 16, 48, 16, 4)  # requests at a time, one phase after another
PHASE = 50  # requests


class Ask(NamedTuple):
    """One request."""

    number: int
    body: dict[str, Any]  # for /v1/completions
    leaves_after: int | None  # chunks of a stream after which the client goes away


def at_once(number: int) -> int:
    """How many requests may run beside request `number`."""
    return AT_ONCE[number // PHASE % len(AT_ONCE)]


def ask_of(engine: str, seed: int, number: int) -> Ask:
    """Request `number` of the stream."""
    rng = random.Random(f"{seed}/{number}")
    body: dict[str, Any] = {
        "model": "default",
        "prompt": _prompt(rng),
        "max_tokens": rng.choice((1, 2, 7, 24, rng.randint(1, LONGEST_ANSWER))),
    }
    for part in (_sampling, _penalties, _ends, _extras):
        part(body, rng)
    if rng.random() < 0.08:
        _grammar(body, rng, engine)
    if engine == "sglang" and rng.random() < 0.1:
        body["lora_path"] = ADAPTER
    leaves = rng.randint(1, 12) if rng.random() < 0.12 else None
    if leaves is not None or rng.random() < 0.3:
        body["stream"] = True
    return Ask(number, body, leaves)


def probes() -> list[dict[str, Any]]:
    """Greedy requests whose answers must stay the same."""
    rng = random.Random("probes")
    return [
        {"model": "default", "prompt": _prompt(rng), "max_tokens": 48, "temperature": 0, "ignore_eos": True}
        for _ in range(8)
    ]


def _prompt(rng: random.Random) -> list[int]:
    """Tokens; every second prompt begins like others."""
    length = rng.choice((1, 5, 30, rng.randint(1, LONGEST_PROMPT)))
    own = [rng.choice(TOKENS) for _ in range(length)]
    if rng.random() < 0.5:
        shared = random.Random(f"prefix {rng.randrange(PREFIXES)}")
        begin = [shared.choice(TOKENS) for _ in range(LONGEST_PROMPT)]
        return begin[: rng.randint(1, LONGEST_PROMPT)] + own[:20]
    return own


def _sampling(body: dict[str, Any], rng: random.Random) -> None:
    body["temperature"] = rng.choice((0, 0, 0.7, 1.0, 1.5))
    for key, values in {"top_p": (0.5, 0.95), "top_k": (1, 5, 40), "min_p": (0.05, 0.3)}.items():
        if rng.random() < 0.25:
            body[key] = rng.choice(values)
    if rng.random() < 0.3:
        body["seed"] = rng.randrange(2**31)
    if body["temperature"] and rng.random() < 0.06:
        body["n"] = rng.randint(2, 4)


def _penalties(body: dict[str, Any], rng: random.Random) -> None:
    choices: dict[str, Callable[[], Any]] = {
        "frequency_penalty": lambda: round(rng.uniform(-1, 1.5), 2),
        "presence_penalty": lambda: round(rng.uniform(-1, 1.5), 2),
        "repetition_penalty": lambda: round(rng.uniform(0.8, 1.5), 2),
        "logit_bias": lambda: {str(rng.choice(TOKENS)): rng.choice((-100, -2, 3)) for _ in range(3)},
    }
    for key, value in choices.items():
        if rng.random() < 0.08:
            body[key] = value()


def _ends(body: dict[str, Any], rng: random.Random) -> None:
    if rng.random() < 0.4:
        body["ignore_eos"] = True
    if rng.random() < 0.15:
        body["stop"] = [chr(rng.randint(97, 122)) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.1:
        body["stop_token_ids"] = rng.sample(TOKENS, 3)
    if rng.random() < 0.1:
        body["min_tokens"] = rng.randint(0, body["max_tokens"])


def _extras(body: dict[str, Any], rng: random.Random) -> None:
    if rng.random() < 0.1:
        body["logprobs"] = rng.randint(1, 4)
    if rng.random() < 0.1:
        body["eagle_plugin"] = rng.choice(({"draft": False}, {"sources": ["head"]}, {"sources": ["lookup"]}))


def _grammar(body: dict[str, Any], rng: random.Random, engine: str) -> None:
    regex = rng.choice(("[a-f]{3,40}", "(yes|no)( (yes|no)){0,12}", "[0-9]{1,4}-[0-9]{1,4}"))
    body.pop("min_tokens", None)  # beyond the longest text of a grammar no token is allowed
    body |= {"regex": regex} if engine == "sglang" else {"structured_outputs": {"regex": regex}}
