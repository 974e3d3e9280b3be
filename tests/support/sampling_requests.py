"""The servers and requests of the tests of the sampling parameters: many requests in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from serving import GRAPHS, OVERLAP, SYNCHRONOUS

from eagle_plugin.bench.servers import Server

SHAPE = (3, 4, 16)
SETTINGS: dict[str, Any] = {
    "extra_flags": (
        "--skip-server-warmup",
        *("--random-seed", "1"),
        "--enable-custom-logit-processor",
        "--constrained-json-disable-any-whitespace",  # a random model would go on with spaces for ever
    ),
    "max_running_requests": 32,
}
# How rounds run, and the fixture of the head: the parameters of the fixture `plugin`, by their names.
WAYS = {
    "synchronous": (SYNCHRONOUS, "bigram_eagle3"),
    "overlap": (OVERLAP, "bigram_eagle3"),
    "graphs": (GRAPHS, "bigram_eagle3"),
    "all levels at once": (GRAPHS, "bigram_peagle"),
}
PROMPT = "tree root leaf"
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1},
]
REQUESTS = 1000  # per setting
VIEWS = 6
LEAST_P = 1e-4 / (VIEWS * (len(SAMPLING) + 1))  # a right verifier fails one of these tests once in 10,000 runs
PENALISED = {
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": 20,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.2,
    "logit_bias": {"87": 2.5},  # a token that is generated often, and so penalised often
}
AT_ONCE = 500  # the scheduler looks at its whole queue before every batch


def ways_of_rounds(*in_make_test: str) -> list[Any]:
    """Parameters of the fixture `plugin`: these of WAYS in ``make test``, the others in ``make test-matrix``."""
    return [
        pytest.param(way, id=name, marks=() if name in in_make_test else pytest.mark.matrix)
        for name, way in WAYS.items()
    ]


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    """The JSON answer to one POST; an HTTP error raises with the server's own words."""
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=900, trust_env=False)
    if answer.status_code != 200:
        raise RuntimeError(f"POST {path} answered {answer.status_code}: {answer.text}")
    return answer.json()


def ask(
    server: Server, prompts: Sequence[str], sampling: dict[str, Any] | Sequence[dict[str, Any]], **fields: Any
) -> list[dict[str, Any]]:
    """The answers to all prompts, sent as one list; `sampling` is shared or one a prompt."""
    shared = {"ignore_eos": True}
    each = [sampling] * len(prompts) if isinstance(sampling, dict) else sampling
    body = {"text": list(prompts), "sampling_params": [shared | one for one in each], **fields}
    return post(server, "/generate", body)


def draw(
    server: Server, settings: Sequence[dict[str, Any]], count: int, length: int = 4, prompt: str = PROMPT
) -> list[NDArray[np.int64]]:
    """`count` continuations [count, length] of a prompt for each setting, the settings taking turns in the batches."""
    turns = [setting | {"max_new_tokens": length} for _ in range(count) for setting in settings]
    answers = []
    for first in range(0, len(turns), AT_ONCE):
        part = turns[first : first + AT_ONCE]
        answers += ask(server, [prompt] * len(part), part)
    tokens = np.array([answer["output_ids"] for answer in answers], dtype=np.int64)
    return [tokens[i :: len(settings)] for i in range(len(settings))]
