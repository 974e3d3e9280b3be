"""The streaming client against a real local HTTP peer: what it reads, which times it measures, how it fails."""

import httpx
import pytest

from eagle_plugin.bench.engine import EngineEndpoint
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.load import (
    Completion,
    LoadError,
    Sampling,
    accept_length,
    ask_all,
    engine_version,
    flush_prefix_cache,
)
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.stream_fields import Output

NOBODY = EngineEndpoint("http://127.0.0.1:9", ENGINES["sglang"])


def question(text: str, name: str = "q") -> Question:
    return Question(id=name, group="chat", prompt=text)


def completion(tokens: int, rounds: int | None) -> Completion:
    return Completion("q", Output(), "length", 1, tokens, 0.1, 1.0, (), rounds)


def test_text_usage_and_rounds_are_read(peer):
    pieces: list[str] = []
    (answer,) = ask_all(peer.endpoint, [question("hello")], Sampling(max_tokens=5), on_text=pieces.append)
    assert answer.output.text == "w0 w1 w2 w3 w4 " == "".join(pieces)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish_reason) == (3, 5, "length")
    assert answer.verify_rounds == 2


def test_headers_of_an_endpoint_are_sent_with_every_request(peer):
    ask_all(peer.endpoint._replace(headers=(("X-Eagle-Capture", "off"),)), [question("hello")], Sampling(max_tokens=2))
    assert httpx.get(f"{peer.url}/server_info").json()["headers"]["x-eagle-capture"] == "off"
    ask_all(peer.endpoint, [question("hello")], Sampling(max_tokens=2))
    assert "x-eagle-capture" not in httpx.get(f"{peer.url}/server_info").json()["headers"]


def test_the_key_of_the_environment_is_sent(peer, monkeypatch):
    monkeypatch.setenv("EAGLE_API_KEY", "sk-tr4nquil")
    ask_all(peer.endpoint, [question("hello")], Sampling(max_tokens=2))
    assert httpx.get(f"{peer.url}/server_info").json()["headers"]["authorization"] == "Bearer sk-tr4nquil"


def test_times_are_those_of_the_wire(peer, pace):
    first_s, gap_s = pace
    (answer,) = ask_all(peer.endpoint, [question("hello")], Sampling(max_tokens=7))
    assert len(answer.gaps_s) == 6
    # The peer sleeps at least this long. Before that it sends a chunk with a role and no text, which is not a token.
    assert answer.ttft_s >= first_s
    assert answer.total_s - answer.ttft_s >= 6 * gap_s * 0.9


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("think", Output(reasoning="w0 w1 w2 w3 w4 w5 w6 ")),
        ("reason", Output(reasoning="w0 w1 w2 w3 w4 w5 w6 ")),
        ("call", Output(tool_calls=(("tool0", "w0 w2 w4 w6 "), ("tool1", "w1 w3 w5 ")))),
    ],
)
def test_reasoning_and_tool_calls_are_tokens_as_text_is(peer, pace, name, output):
    first_s, gap_s = pace
    pieces: list[str] = []
    answers = ask_all(peer.endpoint, [question(name)] * 2, Sampling(max_tokens=7), on_text=pieces.append)
    assert answers[0].output == answers[1].output == output and answers[0].output.text == ""
    assert "".join(pieces).count("w6") == 2
    for answer in answers:
        assert answer.completion_tokens == 7 and len(answer.gaps_s) == 6
        assert answer.ttft_s < answer.total_s - 5 * gap_s  # the first token, and not the end of the stream
        assert answer.total_s - answer.ttft_s >= 6 * gap_s * 0.9


def test_concurrency_is_bounded_and_order_kept(peer):
    questions = [question("hello", f"q{i}") for i in range(7)]
    answers = ask_all(peer.endpoint, questions, Sampling(max_tokens=2), concurrency=3)
    assert [answer.question_id for answer in answers] == [f"q{i}" for i in range(7)]
    assert httpx.get(f"{peer.url}/server_info").json()["peak"] == 3


def test_one_at_a_time_really_is(peer):
    ask_all(peer.endpoint, [question("hello", f"q{i}") for i in range(3)], Sampling(max_tokens=2))
    assert httpx.get(f"{peer.url}/server_info").json()["peak"] == 1


def test_an_answer_without_text_is_an_answer(peer, pace):
    (answer,) = ask_all(peer.endpoint, [question("quiet")], Sampling(max_tokens=1))
    assert answer.output.text == "" and answer.ttft_s >= pace[0]


@pytest.mark.parametrize(("text", "message"), [("error", "no room"), ("cut", "ended without")])
def test_failures_name_the_prompt(peer, text, message):
    with pytest.raises(LoadError, match=message) as failure:
        ask_all(peer.endpoint, [question("hello", "good"), question(text, "the-bad-one")], Sampling(max_tokens=2))
    assert "the-bad-one" in str(failure.value)


def test_nobody_there():
    with pytest.raises(LoadError, match="does not name a model"):
        ask_all(NOBODY, [question("hello")], Sampling())


def test_accept_length_counts_delivered_tokens_of_verify_rounds_only():
    assert accept_length([completion(65, 32), completion(9, 8)]) == 72 / 40
    assert accept_length([completion(65, 32), completion(64, None)]) == 2.0
    assert accept_length([completion(64, None)]) is None
    assert accept_length([]) is None


def test_engine_questions(peer):
    assert engine_version(peer.endpoint) == "9.9"
    flush_prefix_cache(peer.endpoint)
    assert httpx.get(f"{peer.url}/server_info").json()["flushes"] == 1
    with pytest.raises(LoadError, match="http://127.0.0.1:9: the prefix cache was not emptied"):
        flush_prefix_cache(NOBODY)
