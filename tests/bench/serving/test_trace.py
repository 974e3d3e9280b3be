"""Totals of a trace, and the comparison with the best fixed shape, from known windows."""

import pytest

from eagle_plugin.bench.cells import requests_of
from eagle_plugin.bench.closed_loop import Mark, Window
from eagle_plugin.bench.load import Completion
from eagle_plugin.bench.prompt_kinds import questions_of
from eagle_plugin.bench.serving.trace import STEPS, TraceStep, best_fixed, describe_server, total_rates, trace_phases
from eagle_plugin.bench.stream_fields import Output


def window(seconds: float, tokens: int, rounds: int | None = 10, cpu: float = 1.0) -> Window:
    answer = Completion("q", Output(), "length", 1, tokens + 1, 0.1, 1.0, (), rounds)
    return Window(Mark(5.0, 2.0), Mark(5.0 + seconds, 2.0 + cpu), tokens, (answer,), (answer,))


TRACE = [TraceStep(1, "code"), TraceStep(8, "chat")]
PLAIN = [[window(10.0, 100, None), window(2.0, 200, None)], [window(10.0, 100, None), window(2.0, 200, None)]]
OURS = [[window(5.0, 100, 50), window(2.0, 200, 100)], [window(4.0, 100, 50), window(1.0, 200, 80)]]


def test_the_total_weighs_phases_by_their_time():
    assert total_rates(PLAIN) == [25.0, 25.0]  # the mean of the phases' rates would be 55
    assert total_rates(OURS) == [300 / 7, 60.0]


def test_a_server_is_described_by_phase_and_in_total():
    ours = describe_server(TRACE, OURS, PLAIN, "2/4/8")
    assert [phase.tokens_per_s.median for phase in ours.phases] == [22.5, 150.0]
    assert [phase.accept_length for phase in ours.phases] == [2.0, round(400 / 180, 3)]
    assert ours.accept_length == round(600 / 280, 3) and ours.cpu_seconds_per_token == round(4 / 600, 5)
    assert ours.ratio_vs_plain is not None
    assert ours.ratio_vs_plain.median == pytest.approx((300 / 7 + 60) / 2 / 25, abs=1e-3)
    plain = describe_server(TRACE, PLAIN, PLAIN, None)
    assert plain.ratio_vs_plain is None and plain.accept_length is None


def test_the_plugin_is_compared_with_the_best_fixed_shape():
    faster = [[window(4.0, 100), window(1.0, 200)]] * 2
    name, ratio = best_fixed({"plain": PLAIN, "fixed 2/4/8": PLAIN, "fixed 1/1/2": faster, "plugin": OURS})
    assert name == "fixed 1/1/2" and ratio is not None and ratio.q3 < 1.0
    other, higher = best_fixed({"fixed 2/4/8": PLAIN, "plugin": OURS})
    assert other == "fixed 2/4/8" and higher is not None and higher.q1 > 1.0
    assert best_fixed({"plain": PLAIN, "plugin": OURS}) == (None, None)


def test_the_load_rises_and_falls_and_the_prompts_change_and_change_back(tmp_path):
    clients = [step.clients for step in STEPS]
    assert clients[0] == clients[-1] == 1 and max(clients) == 32
    kinds = [step.prompts for step in STEPS]
    assert kinds[0] == kinds[-1] == "code" and "chat" in kinds
    questions = {kind: questions_of(kind, tmp_path) for kind in set(kinds)}
    first, second = (trace_phases(STEPS, questions, repeat, 48) for repeat in (0, 1))
    assert [phase.clients for phase in first] == clients
    assert [len(phase.asks) for phase in first] == [requests_of(count) for count in clients]
    for phase, kind in zip(first, kinds, strict=True):
        assert {ask.question.group for ask in phase.asks} == {kind}
    assert first != second
