"""The closed loop: which questions run together, and what is counted in which window."""

import httpx
import pytest

from eagle_plugin.bench.closed_loop import Answer, Ask, Mark, Phase, ask_in_phases, cut_windows
from eagle_plugin.bench.load import Completion, LoadError
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.stream_fields import Output


def completion(name: str, tokens: int, ttft_s: float = 0.5, total_s: float = 1.0) -> Completion:
    return Completion(name, Output(), "length", 1, tokens, ttft_s, total_s, (), None)


def answer(phase: int, *arrivals: tuple[float, int], name: str = "q") -> Answer:
    ended, tokens = arrivals[-1]
    return Answer(phase, completion(name, tokens), ended, arrivals)


def test_tokens_have_arrived_from_their_moment_on():
    one = answer(0, (1.0, 1), (2.0, 4), (3.0, 5))
    assert [one.tokens_at(moment) for moment in (0.9, 1.0, 1.9, 2.0, 2.5, 9.0)] == [0, 1, 1, 4, 4, 5]


def test_the_tail_is_cut():
    """Two clients, three questions: from 4.0 on only one client has work, and its tokens do not count."""
    answers = [
        answer(0, (1.0, 1), (2.0, 10)),
        answer(0, (1.0, 1), (4.0, 20)),
        answer(0, (3.0, 1), (4.0, 6), (9.0, 30)),
    ]
    (window,) = cut_windows([Mark(0.0, 1.0), Mark(4.0, 7.0)], answers)
    assert window.tokens == 10 + 20 + 6 and window.seconds == 4.0
    assert window.tokens_per_s == 9.0
    assert window.cpu_seconds_per_token == pytest.approx(6 / 36)
    assert len(window.asked) == 3 and len(window.finished) == 2
    (uncut,) = cut_windows([Mark(0.0, 1.0), Mark(9.0, 7.0)], answers)  # control: with the tail the rate is lower
    assert uncut.tokens_per_s == 60 / 9 < window.tokens_per_s


def test_an_answer_across_a_border_counts_on_both_sides():
    answers = [answer(0, (1.0, 2), (5.0, 12), name="first"), answer(1, (4.0, 3), (6.0, 8), name="second")]
    first, second = cut_windows([Mark(0.0, 0.0), Mark(3.0, 0.0), Mark(6.0, 0.0)], answers)
    assert (first.tokens, second.tokens) == (2, 10 + 8)
    assert first.tokens + second.tokens == 20
    assert [one.question_id for one in first.asked] == ["first"] and first.finished == ()
    assert [one.question_id for one in second.asked] == ["second"]


def test_medians_are_of_the_answers_that_ended_in_the_window():
    short, long = completion("a", 11, 0.1, 1.1), completion("b", 11, 9.0, 99.0)
    answers = [Answer(0, short, 1.0, ((1.0, 11),)), Answer(0, long, 9.0, ((9.0, 11),))]
    (window,) = cut_windows([Mark(0.0, 0.0), Mark(2.0, 0.0)], answers)
    assert window.times.ttft_ms == pytest.approx(100.0) and window.times.tpot_ms == pytest.approx(100.0)
    (early,) = cut_windows([Mark(0.0, 0.0), Mark(0.5, 0.0)], answers)  # none ended: all that were asked
    assert early.times.ttft_ms == pytest.approx(4550.0)


def asks(count: int, tokens: int = 2, text: str = "hello") -> list[Ask]:
    return [Ask(Question(id=f"q{i}", group="chat", prompt=text), tokens) for i in range(count)]


def test_so_many_clients_are_busy_and_every_question_is_asked(peer):
    cpu = iter((10.0, 13.0))
    done: list[int] = []
    (window,) = ask_in_phases(peer.endpoint, [Phase(3, asks(7))], cpu_seconds=lambda: next(cpu), on_done=done.append)
    assert sorted(one.question_id for one in window.asked) == [f"q{i}" for i in range(7)]
    assert httpx.get(f"{peer.url}/server_info").json()["peak"] == 3
    assert done[-1] == 7
    assert window.end.cpu_seconds - window.begin.cpu_seconds == 3.0
    # The peer reports 2 verify rounds for each answer.
    assert {one.verify_rounds for one in window.asked} == {2}


def test_the_window_ends_when_a_client_finds_no_question(peer, pace):
    first_s, gap_s = pace
    uneven = [Ask(asks(1)[0].question, tokens) for tokens in (2, 20)]
    (window,) = ask_in_phases(peer.endpoint, [Phase(2, uneven)])
    assert len(window.finished) == 1 and len(window.asked) == 2
    assert window.tokens < 22  # the long answer's tokens after the end of the short one are not counted
    alone = ask_in_phases(peer.endpoint, [Phase(1, uneven)])[0]
    assert alone.tokens == 22 and alone.seconds >= 2 * first_s + 20 * gap_s


def test_phases_follow_each_other_without_a_pause(peer):
    phases = [Phase(1, asks(2)), Phase(4, asks(5)), Phase(1, asks(2))]
    windows = ask_in_phases(peer.endpoint, phases)
    assert [len(window.asked) for window in windows] == [2, 5, 2]
    assert all(early.end == late.begin for early, late in zip(windows, windows[1:], strict=False))
    assert httpx.get(f"{peer.url}/server_info").json()["peak"] == 4
    assert sum(window.tokens for window in windows) == 2 * 9  # the last phase has one client, so there is no tail


def test_a_failed_request_ends_the_loop(peer):
    bad = Ask(Question(id="the-bad-one", group="chat", prompt="error"), 2)
    with pytest.raises(LoadError, match="the-bad-one.*no room"):
        ask_in_phases(peer.endpoint, [Phase(2, [*asks(2), bad, *asks(3)])])
