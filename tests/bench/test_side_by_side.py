"""Two answers in two columns, from servers of which only one runs at a time."""

import io
import re

import httpx
import pytest
from rich.console import Console

from eagle_plugin.bench import side_by_side
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.side_by_side import Column, show_side_by_side


@pytest.fixture
def servers(start_peer):
    servers = {"plain decoding": start_peer("plain", "--gap", "0.02"), "ours": start_peer("ours", "--gap", "0.01")}
    for server in servers.values():
        server.wait_ready(30)
        server.pause()
    return servers


QUESTIONS = [Question(id="q1", group="chat", prompt="why [bold]?"), Question(id="q2", group="chat", prompt="how?")]


@pytest.mark.parametrize("terminal", [True, False])
def test_both_answers_and_speeds_are_on_the_screen(servers, terminal):
    sink = io.StringIO()
    console = Console(file=sink, width=100, force_terminal=terminal)
    show_side_by_side(servers, QUESTIONS, 12, Steps(console))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sink.getvalue())
    *_, last = text.split("how?")  # the last state of the second pair of columns
    for part in ("plain decoding", "ours"):
        assert part in last
    assert last.count("w11") == 2
    speeds = [float(one) for one in re.findall(r"([0-9.]+) tokens/s", last)]
    assert len(speeds) == 2  # no server can be faster than its pauses, however busy the machine is
    assert 0 < speeds[0] <= 12 / (12 * 0.02) and 0 < speeds[1] <= 12 / (12 * 0.01)
    assert last.count("accept length 5.50") == 2  # 11 tokens in 2 rounds, as the peer reports
    assert "why [bold]?" in text


def test_the_other_server_is_paused_meanwhile(servers, monkeypatch):
    asked = []

    def ask(column, server, question, max_tokens):
        asked.append((column.title, question.id))
        for name, other in servers.items():
            if name != column.title:
                with pytest.raises(httpx.ReadTimeout):
                    httpx.get(f"{other.url}/health", timeout=0.2)
        original(column, server, question, max_tokens)
        with pytest.raises(httpx.ReadTimeout):  # paused again after its answer
            httpx.get(f"{server.url}/health", timeout=0.2)

    original = Column.ask
    monkeypatch.setattr(side_by_side.Column, "ask", ask)
    show_side_by_side(servers, QUESTIONS, 2, Steps(Console(file=io.StringIO())))
    assert asked == [(name, question.id) for question in QUESTIONS for name in servers]


def test_a_column_fills_while_the_answer_arrives(servers):
    seen = []

    class Watched(Column):
        def _set_tokens(self, tokens):
            super()._set_tokens(tokens)
            seen.append((tokens, self.text, self.speed))

    Watched("ours").ask(servers["ours"], QUESTIONS[0], 4)
    counts = [tokens for tokens, _, _ in seen]
    assert counts[:4] == [1, 2, 3, 4]
    assert all(speed.endswith(" tokens/s") for _, _, speed in seen)
