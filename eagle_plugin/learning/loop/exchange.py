"""Exchanges the head of a running server while requests are running, and compares the texts before and after."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from eagle_plugin.bench.load import Completion, LoadError, Sampling, accept_length, ask_all
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.spec import EngineName
from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.deploy_folder import FOLDER
from eagle_plugin.learning.loop.prompts import LoopError
from eagle_plugin.learning.loop.server import plugin_server
from eagle_plugin.learning.loop.traffic import read_questions

DEPLOY_SECONDS = 300.0  # the longest exchange
Ask = Callable[[Question], Completion]


class Asked(NamedTuple):
    """One request of a client: when it began and ended (`time.monotonic`), and its answer or error."""

    question: str
    began: float
    ended: float
    answer: Completion | None
    error: str = ""


def exchange_head(
    target: Path,
    base: Path,
    trained: Path,
    prompts: Path,
    folder: Path,
    engine: EngineName,
    clients: int,
    questions: int,
    max_tokens: int,
) -> None:
    """Serve in float32 with the base head, put the trained head in its place under load, and write swap.json.

    clients: that ask the first so many `questions` of the prompts.

    Raises:
        ServerError, LoadError, LoopError: with one sentence for the user.
    """
    asked_for = read_questions(prompts)[:questions]
    steps = Steps(Console(stderr=True))
    mailbox = folder / "deploy"
    mailbox.mkdir(mode=0o700, exist_ok=True)
    sampling, environment = Sampling(max_tokens=max_tokens), {FOLDER: str(mailbox)}
    with plugin_server(engine, target, base, max(clients, 2), environment, "swap", folder, steps, True) as server:

        def ask(question: Question) -> Completion:
            return ask_all(server.endpoint, [question], sampling)[0]

        with steps.step("answers with the base head") as step:
            before = {}
            for number, question in enumerate(asked_for, 1):
                before[question.id] = ask(question)
                step.update(f"{number} of {len(asked_for)}", number / len(asked_for))
        with steps.step("exchanging the head under load"):
            exchange = partial(deploy, trained, server.url, mailbox, folder / "logs/deploy.log")
            asked, window, deployed = under_load(ask, asked_for, clients, exchange)
        server.check_alive("after its head was exchanged")
    facts = judge(before, asked, window) | {"deployed": deployed}
    write_output(folder / "swap.json", [json.dumps(facts, indent=1), "\n"])


def deploy(head: Path, url: str, mailbox: Path, log: Path) -> dict[str, Any]:
    """`eagle-plugin deploy HEAD --server URL --folder MAILBOX`; what it printed as JSON.

    Raises:
        LoopError: it failed; the last line that it printed is told.
    """
    command = [sys.executable, "-m", "eagle_plugin.cli", "deploy", str(head), "--server", url]
    command += ["--folder", str(mailbox), "--no-watch", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEPLOY_SECONDS, env=os.environ)
    except subprocess.TimeoutExpired as error:
        raise LoopError(f"the head was not exchanged within {DEPLOY_SECONDS:.0f} s; see the server's log") from error
    write_output(log, [done.stdout, done.stderr])
    if done.returncode:
        last = ([*filter(None, (done.stderr or done.stdout).splitlines())] or ["it printed nothing"])[-1]
        raise LoopError(f"`eagle-plugin deploy` ended with exit code {done.returncode}: {last}")
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def under_load(
    ask: Ask, questions: Sequence[Question], clients: int, exchange: Callable[[], dict[str, Any]]
) -> tuple[list[Asked], tuple[float, float], dict[str, Any]]:
    """Clients ask the questions again and again; `exchange` runs in between.

    It begins when every client has an answer, and the clients go on until each question was begun after its end.

    Returns:
        all requests, begin and end of the exchange, and what it returned.
    """
    asked: list[Asked] = []
    lock, stop, warm = threading.Lock(), threading.Event(), threading.Barrier(clients + 1)

    def client(first: int) -> None:
        turn, waiting = first, True
        while not stop.is_set():
            question = questions[turn % len(questions)]
            one = _ask(ask, question)
            with lock:
                asked.append(one)
            if waiting:
                waiting = False
                warm.wait()
            turn += 1

    # Every client begins at another question.
    starts = [number * len(questions) // clients for number in range(clients)]
    threads = [threading.Thread(target=client, args=(start,), daemon=True) for start in starts]
    for thread in threads:
        thread.start()
    warm.wait()
    time.sleep(0.3)  # every client is in its second request
    began = time.monotonic()
    try:
        result = exchange()
        ended = time.monotonic()
        wanted = {question.id for question in questions}
        while True:
            with lock:
                done = {one.question for one in asked if one.began >= ended}
                failed = any(one.error for one in asked)
            if failed or done >= wanted:
                return asked, (began, ended), result
            time.sleep(0.1)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _ask(ask: Ask, question: Question) -> Asked:
    began = time.monotonic()
    try:
        answer = ask(question)
    except LoadError as error:
        return Asked(question.id, began, time.monotonic(), None, str(error))
    return Asked(question.id, began, time.monotonic(), answer)


def judge(before: Mapping[str, Completion], asked: Sequence[Asked], window: tuple[float, float]) -> dict[str, Any]:
    """What the exchange did to the requests.

    Returns:
        counts of requests, of those that ran at any moment of the exchange, of those that failed, of those whose text
        differs from the one before; the accept lengths of requests that ended before it began or began after it ended.
    """
    began, ended = window
    lengths = {
        "accept_length_before": accept_length([*before.values(), *_answers(one for one in asked if one.ended < began)]),
        "accept_length_after": accept_length(_answers(one for one in asked if one.began >= ended)),
    }
    return {
        "requests": len(asked),
        "during": sum(one.began < ended and one.ended > began for one in asked),
        "after": sum(one.began >= ended for one in asked),
        "failed": sum(one.answer is None for one in asked),
        "errors": sorted({one.error for one in asked if one.error})[:3],
        "responses_changed": sum(
            one.answer is not None and one.answer.output != before[one.question].output for one in asked
        ),
        "seconds": round(ended - began, 3),
        **{name: None if value is None else round(value, 3) for name, value in lengths.items()},
    }


def _answers(asked: Any) -> list[Completion]:
    return [one.answer for one in asked if one.answer is not None]
