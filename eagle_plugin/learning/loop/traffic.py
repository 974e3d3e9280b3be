"""Serves the target with a head, and lets it answer the prompts: answers and hidden states are recorded in one pass."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.spec import EngineName
from eagle_plugin.collect.settings import STORE
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.sources.prompts import read_prompts
from eagle_plugin.learning.jobs.answers import features_of
from eagle_plugin.learning.loop.prompts import LoopError, question_of
from eagle_plugin.learning.loop.server import plugin_server


def record_traffic(target: Path, head: Path, folder: Path, engine: EngineName, tokens: int, concurrency: int) -> None:
    """`data collect`: ask every prompt of `folder`/prompts.jsonl once, greedily, at a server with EAGLE_FEATURES.

    The answers are in `folder`/recorded.jsonl, their hidden states in `folder`/features/recorded. What a run before
    this one has recorded is not asked again; of answers whose states it lost, only the states are computed.

    tokens: of the longest answer. concurrency: prompts that are asked at a time.

    Raises:
        ServerError, DataError, LoopError: with one sentence for the user.
    """
    from eagle_plugin.learning.data import collect  # imports torch

    rows = folder / "recorded.jsonl"
    store = str(features_of(rows).resolve())
    steps = Steps(Console(stderr=True))
    with plugin_server(engine, target, head, concurrency, {STORE: store}, "traffic", folder, steps) as server:
        command = [str(folder / "prompts.jsonl"), "--endpoint", server.url, "--target", str(target), "--store", store]
        command += ["--out", str(rows), "--max-tokens", str(tokens), "--temperature", "0"]
        try:
            failed = collect.main([*command, "--concurrency", str(concurrency)])
        except DataError:
            server.check_alive("while it answered prompts")  # the command knows only that it does not answer
            raise
    if failed:
        raise LoopError("not every prompt has an answer with its hidden states, see above; run the same command again")


def read_questions(prompts: Path) -> list[Question]:
    """The prompts of a file as questions: the last turn with those before it."""
    found = []
    for prompt in read_prompts(prompts):
        turns = prompt.messages or []
        found.append(
            Question(
                id=prompt.id,
                group=prompt.source,
                prompt=question_of(prompt),
                messages=turns if len(turns) > 1 else None,
            )
        )
    return found
