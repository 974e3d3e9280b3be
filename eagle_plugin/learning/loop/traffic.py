"""Serves the target with EAGLE_CAPTURE, and asks it the prompts of the traffic through its OpenAI endpoint."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from eagle_plugin.bench.load import Completion, Sampling, accept_length, ask_all
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.spec import EngineName
from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.learning.data.sources.prompts import read_prompts
from eagle_plugin.learning.data.traffic.segments import counts_of, segments_of
from eagle_plugin.learning.loop.prompts import question_of
from eagle_plugin.learning.loop.server import plugin_server
from eagle_plugin.traffic.metrics import DROPPED
from eagle_plugin.traffic.settings import FOLDER

# The writer has the least priority, and a server that shuts down waits for it for ten seconds only. After so many
# seconds without a further record the rest is given up: the loop goes on with what there is.
PATIENCE_S = 90.0


def record_traffic(target: Path, head: Path, folder: Path, engine: EngineName, tokens: int, concurrency: int) -> None:
    """Ask every prompt of `folder`/prompts.jsonl once, greedily; the server records it in `folder`/capture.

    What a run before this one has recorded is not asked again. `folder`/traffic.json is written last.

    tokens: of the longest answer. concurrency: prompts that are asked at a time.

    Raises:
        ServerError, LoadError: with one sentence for the user.
    """
    recording = (folder / "capture").resolve()
    steps = Steps(Console(stderr=True))
    questions = read_questions(folder / "prompts.jsonl")
    asked = recorded_questions(recording)
    missing = [question for question in questions if question.prompt not in asked]
    environment = {FOLDER: str(recording)}
    answers: list[Completion] = []
    counted = answers_counted(recording)
    seconds = 0.0
    if missing:
        with plugin_server(engine, target, head, concurrency, environment, "capture", folder, steps) as server:
            began = time.monotonic()
            with steps.step("asking") as step:

                def done(answer: Completion) -> None:
                    answers.append(answer)
                    left = (time.monotonic() - began) / len(answers) * (len(missing) - len(answers))
                    text = f"{len(answers)} of {len(missing)} prompts, {timedelta(seconds=round(left))} left"
                    step.update(text, len(answers) / len(missing))

                sampling = Sampling(max_tokens=tokens)
                ask_all(server.endpoint, missing, sampling, concurrency=concurrency, on_done=done)
            seconds = time.monotonic() - began
            with steps.step("waiting until all is recorded"):
                wait_recorded(recording, counted + len(missing))
    made = sum(answer.completion_tokens for answer in answers)
    length = accept_length(answers)
    facts = {
        "asked": len(questions),
        "asked_in_this_run": len(answers),
        "recorded": len(recorded_questions(recording)),
        "tokens": made,
        "tokens_per_s": round(made / seconds, 1) if seconds else None,
        "accept_length": None if length is None else round(length, 3),
    }
    write_output(folder / "traffic.json", [json.dumps(facts, indent=1), "\n"])


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


def answers_counted(recording: Path) -> int:
    """How many answers the servers of this recording have written, filtered or dropped."""
    counts = counts_of(recording)
    return sum(count for name, count in counts.items() if name in ("records", "filtered") or name.startswith(DROPPED))


def wait_recorded(recording: Path, wanted: int, patience_s: float = PATIENCE_S, pause_s: float = 0.5) -> None:
    """Wait until `wanted` answers are counted, or nothing more was counted for `patience_s`."""
    found, since = -1, time.monotonic()
    while (now := answers_counted(recording)) < wanted:
        if now > found:
            found, since = now, time.monotonic()
        elif time.monotonic() - since > patience_s:
            return
        time.sleep(pause_s)


def recorded_questions(recording: Path) -> set[str]:
    """The first user turn of every record; a line that a kill has cut is left out."""
    questions = set()
    for path in segments_of(recording) if recording.is_dir() else []:
        for line in path.read_bytes().split(b"\n"):
            try:
                turns = json.loads(line)["request"]["messages"]
            except (ValueError, KeyError, TypeError):
                continue
            questions.add(next((turn["content"] for turn in turns if turn["role"] == "user"), ""))
    return questions
