"""benchmarks/capture_cost.py: what is compared, in which order, and that the capture really was on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks import capture_cost
from benchmarks.capture_cost import check_recorded, finish_writing, order, parse, sizes_of
from benchmarks.capture_ratios import Measurement, ratios, same_state_ratios
from eagle_plugin.bench.closed_loop import Ask, Phase
from eagle_plugin.bench.load import LoadError
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.spec import ServerSpec


def measured(repeat: int, place: int, state: str, tokens_per_s: float) -> Measurement:
    return Measurement(
        repeat=repeat, place=place, state=state, tokens_per_s=tokens_per_s, cpu_ms_per_token=2000 / tokens_per_s,
        tpot_ms=1000 / tokens_per_s, ttft_ms=1.0, tokens=100, requests=10, seconds=1.0, others=0.0, steal=None,
        left_seconds=0.0,
    )  # fmt: skip


def repeat(number: int, *speeds: float) -> list[Measurement]:
    states = zip(order(number), speeds, strict=True)
    return [measured(number, place, state, speed) for place, (state, speed) in enumerate(states)]


def test_a_ratio_compares_the_means_of_one_repeat() -> None:
    found = [*repeat(0, 100, 99, 99, 100), *repeat(1, 30, 50, 50, 50)]
    assert ratios(found, "tokens_per_s") == [0.99, 0.8]
    assert ratios(found[:4], "tpot_ms") == ratios(found[:4], "cpu_ms_per_token") == pytest.approx([100 / 99])


def test_chance_is_seen_between_measurements_of_one_state() -> None:
    """By their places, not by their order in the list."""
    assert same_state_ratios(repeat(0, 100, 50, 60, 110)[::-1]) == pytest.approx([1.1, 1.2])


def test_a_machine_that_slows_down_favours_neither_state() -> None:
    assert ratios([*repeat(0, 100, 90, 80, 70), *repeat(1, 100, 90, 80, 70)], "tokens_per_s") == [1.0, 1.0]
    assert order(0)[0] != order(1)[0] and order(0) == order(2)


def test_the_server_records_all_answers(tmp_path: Path) -> None:
    plain = ServerSpec(tmp_path, "plain", tmp_path, environment={"A": "1"})
    spec = capture_cost.server_spec(plain, tmp_path / "capture")
    wanted = {"A": "1", "EAGLE_POLICY": "fixed", "EAGLE_CAPTURE": str(tmp_path / "capture")}
    assert wanted.items() <= spec.environment.items()
    assert spec.mode == "plugin"


def test_requests_say_whether_they_are_recorded(peer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_cost, "SETTLED_SECONDS", 0.0)
    server = SimpleNamespace(endpoint=peer.endpoint, cpu_clock=lambda: time.process_time)
    phase = Phase(1, [Ask(Question(id="q", group="chat", prompt="hello"), 2)])
    for state, wanted in (("off", "off"), ("on", None)):
        capture_cost.load(server, state, phase, tmp_path)  # type: ignore[arg-type]
        asked = httpx.get(f"{peer.url}/server_info").json()
        assert asked["headers"].get("x-eagle-capture") == wanted
    assert asked["flushes"] == 2


def test_a_capture_that_missed_answers_is_no_result() -> None:
    found = [measured(0, 0, "off", 100), measured(0, 1, "on", 99), measured(0, 2, "on", 99)]
    counts = {"records": 15, "filtered": 3, "dropped:queue_full": 2, "dropped:opt_out": 10, "bytes": 7}
    check_recorded(counts, found)
    with pytest.raises(LoadError, match="handled 19 answers, wanted at least the 20"):
        check_recorded(counts | {"filtered": 2, "dropped:opt_out": 30}, found)
    with pytest.raises(LoadError, match="left out 9 answers, wanted at least the 10"):
        check_recorded(counts | {"dropped:opt_out": 9}, found)


def test_the_writer_finishes_before_the_next_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "capture-1.counts.json").write_text(json.dumps({"records": 7}))
    monkeypatch.setattr(capture_cost, "SETTLED_SECONDS", 0.3)
    assert 0 <= finish_writing(tmp_path) < 0.3


def test_a_quick_run_is_smaller() -> None:
    quick, whole = (sizes_of(parse(args)) for args in (["--quick"], []))
    assert all(a < b for a, b in zip(quick, whole, strict=True)) and whole.repeats == 24
    assert sizes_of(parse(["--repeats", "4", "--requests", "5"]))[:2] == (4, 5)
