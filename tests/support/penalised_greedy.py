"""Greedy text under penalties: by transformers, one token at a time, and asked of a server beside other requests."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from sampling_distribution import distribution, next_logits, prompt_ids
from sampling_requests import ask
from serving import accept_length

from eagle_plugin.bench.servers import Server

PENALTIES = [
    {"frequency_penalty": 0.9},
    {"presence_penalty": 0.5, "repetition_penalty": 1.4},
    {"frequency_penalty": 0.3, "presence_penalty": -0.4, "repetition_penalty": 0.8},
]
PROMPTS = ["tree root leaf", "the quick brown fox", "a", "one two three four"]
LENGTH = 40


def greedy_ids(target: Path, prompt: str, length: int, penalties: dict[str, float]) -> list[int]:
    """`length` tokens of transformers under penalties on the generated tokens, the prompt left out."""
    return _greedy_ids(target, prompt, length, tuple(penalties.items()))


@functools.cache
def _greedy_ids(target: Path, prompt: str, length: int, penalties: tuple[tuple[str, float], ...]) -> list[int]:
    ids = torch.tensor([prompt_ids(target, prompt)])
    start, setting = ids.shape[1], dict(penalties) | {"temperature": 0}
    for _ in range(length):
        logits = next_logits(target, ids)
        times = torch.bincount(ids[0, start:], minlength=logits.shape[1])[None]
        ids = torch.cat([ids, distribution(logits, times, setting).argmax(-1)[None]], dim=1)
    return ids[0, start:].tolist()


def ask_penalised(server: Server, penalties: dict[str, float]) -> list[dict[str, Any]]:
    """Three answers to each of PROMPTS, taking turns with sampled requests without penalties; then three more alone."""
    sampling = {"temperature": 0, "max_new_tokens": LENGTH} | penalties
    answers = ask(server, PROMPTS * 3, [sampling, {"temperature": 1.0, "max_new_tokens": LENGTH}] * 6)
    return answers + ask(server, PROMPTS * 3, sampling)


def assert_penalised_greedy_text(answers: list[dict[str, Any]], target: Path, penalties: dict[str, float]) -> None:
    """The answers of :func:`ask_penalised` are those of transformers, and penalties change the text."""
    wanted = [greedy_ids(target, prompt, LENGTH, penalties) for prompt in PROMPTS]
    assert wanted != [greedy_ids(target, prompt, LENGTH, {}) for prompt in PROMPTS]
    penalised = [*range(0, 12, 2), *range(12, 24)]
    for i in penalised:
        assert answers[i]["output_ids"] == wanted[i % len(PROMPTS)], i
    assert accept_length(answers[12:]) > 1.2
