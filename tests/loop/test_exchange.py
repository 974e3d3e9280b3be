"""The exchange of a head under load: who was asked when, and what counts as a fault."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from eagle_plugin.bench.load import Completion, LoadError
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.stream_fields import Output
from eagle_plugin.learning.loop.exchange import judge, under_load
from eagle_plugin.learning.loop.prompts import LoopError

QUESTIONS = [Question(id=name, group="g", prompt=name) for name in "abcd"]


def completion(question: str, text: str, rounds: int = 10) -> Completion:
    return Completion(question, Output(text), "stop", 5, 31, 0.1, 1.0, (), rounds)


class Server:
    """Answers with the question; after the exchange with fewer rounds, and as `fault` says."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.exchanged = fault, threading.Event()
        self.during = 0

    def ask(self, question: Question) -> Completion:
        time.sleep(0.005)
        after = self.exchanged.is_set()
        if after and self.fault == "fails" and question.id == "c":
            raise LoadError("question 'c': connection closed")
        text = "other" if after and self.fault == "changes" and question.id == "b" else question.id
        return completion(question.id, text, 10 if after else 20)

    def exchange(self) -> dict[str, Any]:
        if self.fault == "refuses":
            raise LoopError("refused")
        time.sleep(0.05)
        self.exchanged.set()
        return {"from": 1, "to": 2}


def run(fault: str = "", clients: int = 3) -> dict[str, Any]:
    server = Server(fault)
    before = {question.id: completion(question.id, question.id, 20) for question in QUESTIONS}
    asked, window, result = under_load(server.ask, QUESTIONS, clients, server.exchange)
    assert result == {"from": 1, "to": 2}
    return judge(before, asked, window)


@pytest.mark.parametrize("clients", [1, 3, 6])
def test_requests_run_before_while_and_after(clients: int) -> None:
    facts = run(clients=clients)
    assert (facts["failed"], facts["responses_changed"], facts["errors"]) == (0, 0, [])
    assert facts["during"] >= clients and facts["after"] >= len(QUESTIONS)
    assert facts["seconds"] >= 0.05
    assert facts["accept_length_before"] == 1.5 and facts["accept_length_after"] == 3.0


def test_changed_responses_and_failed_requests_are_counted() -> None:
    """Control: the judge can find faults."""
    assert run("changes")["responses_changed"] > 0
    facts = run("fails")
    assert facts["failed"] > 0 and facts["errors"] == ["question 'c': connection closed"]


def test_a_refused_exchange_ends_the_clients() -> None:
    server = Server("refuses")
    before = threading.active_count()
    with pytest.raises(LoopError, match="refused"):
        under_load(server.ask, QUESTIONS, 2, server.exchange)
    assert threading.active_count() == before
