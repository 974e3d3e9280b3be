"""benchmarks/capture_cost.py: what is compared, in which order, and that the capture really was on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import capture_cost
from benchmarks.capture_cost import Measurement, check_recorded, finish_writing, order, parse, ratios, sizes_of
from benchmarks.capture_cost import state_specs as specs_of
from eagle_plugin.bench.load import LoadError
from eagle_plugin.bench.spec import ServerSpec


def measured(repeat: int, state: str, tokens_per_s: float) -> Measurement:
    return Measurement(
        repeat=repeat, state=state, tokens_per_s=tokens_per_s, cpu_ms_per_token=2000 / tokens_per_s,
        tpot_ms=1000 / tokens_per_s, ttft_ms=1.0, tokens=100, requests=10, seconds=1.0, others=0.0, steal=None,
        left_seconds=0.0,
    )  # fmt: skip


def test_a_ratio_compares_the_servers_of_one_repeat() -> None:
    found = [measured(0, "off", 100), measured(0, "on", 99), measured(1, "on", 40), measured(1, "off", 50)]
    assert ratios(found, "tokens_per_s") == [0.99, 0.8]
    assert ratios(found, "tpot_ms") == pytest.approx([100 / 99, 1.25])
    assert ratios(found, "cpu_ms_per_token") == pytest.approx([100 / 99, 1.25])


def test_each_server_is_first_in_every_other_repeat() -> None:
    assert [order(repeat)[0] for repeat in range(4)] == ["off", "on", "off", "on"]


def test_the_servers_differ_in_one_variable(tmp_path: Path) -> None:
    specs = specs_of(ServerSpec(tmp_path, "plain", tmp_path, environment={"A": "1"}), tmp_path / "capture")
    off, on = (specs[state].environment for state in ("off", "on"))
    assert off | {"EAGLE_CAPTURE": str(tmp_path / "capture")} == on and off["EAGLE_CAPTURE"] == "" and on["A"] == "1"
    assert {spec.mode for spec in specs.values()} == {"plugin"} and on["EAGLE_POLICY"] == "fixed"
    assert len({spec.label for spec in specs.values()}) == 2


def test_a_capture_that_missed_answers_is_no_result() -> None:
    found = [measured(0, "off", 100), measured(0, "on", 99), measured(1, "on", 99)]
    check_recorded({"records": 15, "filtered": 3, "dropped:queue_full": 2, "bytes": 7}, found)
    with pytest.raises(LoadError, match="handled 19 answers, wanted at least the 20"):
        check_recorded({"records": 15, "filtered": 2, "dropped:queue_full": 2, "bytes": 7}, found)


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
    assert all(a < b for a, b in zip(quick, whole, strict=True)) and whole.repeats == 40
    assert sizes_of(parse(["--repeats", "4", "--requests", "5"]))[:2] == (4, 5)
