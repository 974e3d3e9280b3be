"""Requests of many kinds to engines inside the test's process, on the bigram target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bigram_models
import numpy as np
import peagle_models
from numpy.typing import NDArray
from vllm import LLM, RequestOutput, SamplingParams
from vllm_engines import counters

OPTIONS: dict[str, Any] = {"max_num_seqs": 128, "max_num_batched_tokens": 2048}
TREES: dict[str, Any] = {"depth": 3, "topk": 2, "nodes": 8}
ASYNC: dict[str, Any] = {"plugin": {"async_scheduling": True}, "policy": "random"}
PROMPT = "tree"
PROMPTS = ["tree root leaf", "the quick brown fox", PROMPT, "one two three four", "x = y", "hello", "write", "10 20 30"]


def write_models(folder: Path) -> tuple[Path, Path]:
    """The target and its EAGLE-3 head, written into `folder` once."""
    target, head = folder / "bigram", folder / "bigram-eagle3"
    if not head.exists():
        bigram_models.bigram_target(target)
        bigram_models.bigram_eagle3_head(head, target)
    return target, head


def write_peagle(folder: Path) -> tuple[Path, Path]:
    """The target and a P-EAGLE head of four levels that knows it nearly, written into `folder` once."""
    target, head = write_models(folder)[0], folder / "bigram-peagle"
    if not head.exists():
        peagle_models.peagle_head(head, target, bigram_models.spoken(target), wrong=0.5)
    return target, head


def ask(llm: LLM, prompts: Sequence[str], settings: Sequence[dict[str, Any]], **shared: Any) -> list[RequestOutput]:
    """The answers to prompts, all in one call; settings and `shared` are those of ``SamplingParams``."""
    common = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "detokenize": False} | shared
    made = [SamplingParams(**common | setting) for setting in settings]
    return llm.generate(list(prompts), made, use_tqdm=False)


def tokens(answers: Sequence[RequestOutput]) -> list[list[int]]:
    """The first choice of each answer."""
    return [list(answer.outputs[0].token_ids) for answer in answers]


def endings(answers: Sequence[RequestOutput]) -> list[tuple[Any, ...]]:
    """What a user sees of every choice."""
    return [
        (choice.text, list(choice.token_ids), choice.finish_reason, choice.stop_reason)
        for answer in answers
        for choice in answer.outputs
    ]


def draw(llm: LLM, settings: Sequence[dict[str, Any]], count: int, length: int = 4) -> list[NDArray[np.int64]]:
    """`count` continuations [count, length] of PROMPT for each setting, the settings taking turns in the batches."""
    turns = list(settings) * count
    drawn = np.array(tokens(ask(llm, [PROMPT] * len(turns), turns, max_tokens=length)), dtype=np.int64)
    return [drawn[i :: len(settings)] for i in range(len(settings))]


class Acceptance:
    """Counts the tokens of all verifications; `length` is the mean per verification, the bonus token included."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._before = llm, counters(llm)

    @property
    def length(self) -> float:
        now = counters(self._llm)
        accepted, drafts = (
            now[f"vllm:spec_decode_num_{name}"] - self._before[f"vllm:spec_decode_num_{name}"]
            for name in ("accepted_tokens", "drafts")
        )
        return 1 + accepted / drafts if drafts else 1.0
