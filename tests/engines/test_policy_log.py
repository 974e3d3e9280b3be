"""The policy's log line: when it is written, what it says, and that it can be read again."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from log_lines import Lines

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.costs import CostModel, Costs, Curve, Forward
from eagle_plugin.policy.log import LogSecondsError, PolicyLog, log_seconds, sentence, without_policy
from eagle_plugin.policy.policy import Policy
from eagle_plugin.policy.report import MARK, Expected, PolicyReport, ShapeTotals, present_choice
from eagle_plugin.policy.served_rounds import ServedRound

CAPS = Shape(2, 2, 4)
FORWARD = Forward(Curve.of([(1, 0.01), (64, 0.02)]))


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines() -> Iterator[list[str]]:
    logger, handler = logging.getLogger("test.policy"), Lines()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler.logged
    logger.removeHandler(handler)


def policy_chooser() -> ShapeChooser:
    shapes = ShapeChooser(CAPS, Policy(CAPS, CostModel(Costs(FORWARD, FORWARD, FORWARD))))
    shapes.choose(2, 100)
    return shapes


def test_one_line_per_interval_while_rounds_run(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_POLICY_LOG_SECONDS", "30")
    shapes, clock = policy_chooser(), Clock()
    log = PolicyLog(lambda: shapes, logging.getLogger("test.policy"), clock)

    def steps(seconds: int, rounds: bool = True) -> None:
        for _ in range(seconds):
            clock.now += 1.0
            if rounds:
                shapes.observe(ServedRound(CAPS, 2, 100), [2, 1])
            log.step()

    steps(30)  # the first step begins the interval
    assert not lines
    steps(1)
    assert len(lines) == 1
    steps(29)
    assert len(lines) == 1
    steps(1)
    assert len(lines) == 2 and "policy, 30 s, 60 rounds: 2/2/4 100%; accept length 2.50;" in lines[1]
    steps(100, rounds=False)  # steps without rounds, such as prefills
    assert len(lines) == 2
    steps(1)
    assert len(lines) == 3 and "policy, 101 s, 2 rounds" in lines[2]
    assert lines[2].startswith("eagle-plugin: policy")
    report = PolicyReport.from_json(lines[2].partition(MARK)[2])
    assert report.totals[CAPS].rounds == 2 * 62 and report.requests == 2 and set(report.expected) > {PLAIN, CAPS}


@pytest.mark.parametrize(("seconds", "policy"), [("0", True), ("1", False)])
def test_no_lines(seconds: str, policy: bool, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With 0 seconds, and without a policy; the test above is the control."""
    monkeypatch.setenv("EAGLE_POLICY_LOG_SECONDS", seconds)
    shapes, clock = policy_chooser() if policy else ShapeChooser(CAPS, None), Clock()
    log = PolicyLog(lambda: shapes, logging.getLogger("test.policy"), clock)
    for _ in range(10):
        clock.now += 100.0
        shapes.observe(ServedRound(CAPS, 1, 100), [1])
        log.step()
    assert not lines


def test_a_policy_that_comes_later(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_POLICY_LOG_SECONDS", "1")
    served, clock = [ShapeChooser(CAPS, None)], Clock()
    log = PolicyLog(lambda: served[0], logging.getLogger("test.policy"), clock)
    log.step()
    served[0] = policy_chooser()
    for _ in range(3):
        clock.now += 0.6
        served[0].observe(ServedRound(CAPS, 1, 100), [1])
        log.step()
    assert len(lines) == 1


EXPECTED = {PLAIN: Expected(0.02, 1.0), CAPS: Expected(0.04, 2.5), Shape(1, 1, 2): Expected(0.03, 1.8)}
REPORT = PolicyReport("auto", CAPS, CAPS, 8, 900, expected=EXPECTED)


def test_what_the_line_says() -> None:
    added = {
        CAPS: ShapeTotals(80, 200, 10, 8, 0.4, 0.5),
        PLAIN: ShapeTotals(20, 20, 10, 8, 0.16, 0.12),
    }
    assert sentence(REPORT, added, 60.2) == (
        "policy, 60 s, 100 rounds: 2/2/4 80%, plain 20%; accept length 2.50; 314.3 tokens/s while decoding; "
        "a step took 35.0 ms, -10% against the prediction; "
        "now 2/2/4 for 8 requests, expected 1.25x of plain decoding, next best 1/1/2 with 1.20x"
    )
    many = {Shape(1, 1, width): ShapeTotals(10 - width, 10, 1) for width in range(2, 8)}
    assert "1/1/2 24%, 1/1/3 21%, 1/1/4 18%, 1/1/5 15%, others 21%;" in sentence(REPORT, many, 60)
    plain = sentence(REPORT._replace(present=PLAIN, requests=1), {PLAIN: ShapeTotals(3, 3, 3)}, 60)
    assert plain == "policy, 60 s, 3 rounds: plain 100%; no drafts; now plain for 1 request, next best 2/2/4 with 1.25x"


def test_a_choice_without_an_alternative() -> None:
    only = REPORT._replace(present=PLAIN, expected={PLAIN: Expected(0.02, 1.0)})
    assert present_choice(only) == "now plain for 8 requests"
    assert present_choice(REPORT._replace(expected={})) == "now 2/2/4"


@pytest.mark.parametrize(("text", "seconds"), [("", 60.0), ("0", 0.0), ("2.5", 2.5)])
def test_seconds(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_POLICY_LOG_SECONDS", text)
    assert log_seconds() == seconds


@pytest.mark.parametrize("text", ["-1", "a minute", "nan", "inf"])
def test_wrong_seconds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_POLICY_LOG_SECONDS", text)
    with pytest.raises(LogSecondsError, match=f"EAGLE_POLICY_LOG_SECONDS is '{text}', wanted a number of seconds"):
        log_seconds()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("fixed",), "eagle-plugin: no policy, EAGLE_POLICY is fixed: every round has the shape 2/2/4"),
        (("random",), "eagle-plugin: no policy, EAGLE_POLICY is random: every round has a random shape within 2/2/4"),
        (("auto", "it is late"), "eagle-plugin: no policy, it is late: every round has the shape 2/2/4"),
    ],
)
def test_the_line_of_a_server_without_a_policy(arguments: tuple[str, ...], line: str) -> None:
    assert without_policy(CAPS, *arguments) == line
