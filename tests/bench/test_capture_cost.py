"""benchmarks/capture_cost.py: what is compared, in which order, and that the capture really was on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import capture_cost
from benchmarks.capture_cost import check_recorded, finish_writing, order, parse, sizes_of
from benchmarks.capture_cost import server_specs as specs_of
from benchmarks.capture_ratios import Measurement, ratios, spreads
from eagle_plugin.bench.load import LoadError
from eagle_plugin.bench.spec import ServerSpec


def measured(repeat: int, state: str, tokens_per_s: float) -> Measurement:
    return Measurement(
        repeat=repeat, state=state, tokens_per_s=tokens_per_s, cpu_ms_per_token=2000 / tokens_per_s,
        tpot_ms=1000 / tokens_per_s, ttft_ms=1.0, tokens=100, requests=10, seconds=1.0, others=0.0, steal=None,
        left_seconds=0.0,
    )  # fmt: skip


def test_a_ratio_compares_what_was_measured_in_one_repeat() -> None:
    found = [measured(0, "opt_out", 100), measured(0, "on", 99), measured(1, "on", 40), measured(1, "opt_out", 50)]
    assert ratios(found, "tokens_per_s") == [0.99, 0.8]
    assert ratios(found, "tpot_ms") == pytest.approx([100 / 99, 1.25])
    assert ratios(found, "cpu_ms_per_token") == pytest.approx([100 / 99, 1.25])
    found += [measured(i, state, n) for i in (0, 1) for state, n in (("off", 30), ("twin", 90))]
    assert ratios(found, "tokens_per_s", "twin", ("off",)) == [3, 3]
    assert ratios(found, "tokens_per_s", "on", ("off", "twin")) == pytest.approx([99 / 60, 40 / 60])


def test_ratios_above_one_are_faster() -> None:
    """Of processor time too, where less is faster."""
    states = {"off": 100, "twin": 110, "opt_out": 90, "on": 80}
    found = [measured(0, state, n) for state, n in states.items()]
    for field in ("tokens_per_s", "cpu_ms_per_token"):
        one, twin, other = spreads(found, field)
        assert (one.median, twin.median) == (0.889, 1.1) and 0.75 < other.median < 0.77


def test_every_state_is_measured_first_in_some_repeat_and_pairs_stay_together() -> None:
    orders = [order(repeat) for repeat in range(4)]
    assert sorted(one[0] for one in orders) == sorted(capture_cost.SERVER) and orders[0] == order(4)
    for one in orders:
        assert {frozenset(one[:2]), frozenset(one[2:])} == {frozenset(pair) for pair in capture_cost.PAIRS}


def test_the_servers_differ_in_one_variable(tmp_path: Path) -> None:
    specs = specs_of(ServerSpec(tmp_path, "plain", tmp_path, environment={"A": "1"}), tmp_path / "capture")
    off, twin, on = (specs[name].environment for name in ("off", "twin", "capture"))
    assert off == twin and off | {"EAGLE_CAPTURE": str(tmp_path / "capture")} == on
    assert off["EAGLE_CAPTURE"] == "" and on["A"] == "1" and on["EAGLE_POLICY"] == "fixed"
    assert {spec.mode for spec in specs.values()} == {"plugin"} and len({spec.label for spec in specs.values()}) == 3


def test_a_capture_that_missed_answers_is_no_result() -> None:
    found = [measured(0, "opt_out", 100), measured(0, "on", 99), measured(1, "on", 99)]
    counts = {"records": 15, "filtered": 3, "dropped:queue_full": 2, "dropped:opt_out": 10, "bytes": 7}
    check_recorded(counts, found)
    with pytest.raises(LoadError, match="handled 19 answers, wanted at least the 20"):
        check_recorded(counts | {"filtered": 2, "dropped:opt_out": 30}, found)
    with pytest.raises(LoadError, match="left out 9 answers, wanted at least the 10"):
        check_recorded(counts | {"dropped:opt_out": 9}, found)


def test_the_writer_finishes_before_the_next_server_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server runs meanwhile: a paused one would not send what is queued."""
    state, counts = [], tmp_path / "capture-1.counts.json"

    class Server:
        def resume(self) -> None:
            state.append("runs")
            counts.write_text(json.dumps({"records": 7}))

        def pause(self) -> None:
            state.append("paused")

    monkeypatch.setattr(capture_cost, "SETTLED_SECONDS", 0.3)
    assert 0 <= finish_writing(Server(), tmp_path) < 0.3 and state == ["runs", "paused"]


def test_a_quick_run_is_smaller() -> None:
    quick, whole = (sizes_of(parse(args)) for args in (["--quick"], []))
    assert all(a < b for a, b in zip(quick, whole, strict=True)) and whole.repeats == 32
    assert sizes_of(parse(["--repeats", "4", "--requests", "5"]))[:2] == (4, 5)
