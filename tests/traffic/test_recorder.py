"""The queue before the writer process: it never waits, and counts what it drops."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

import eagle_plugin
from eagle_plugin.common import metric_registry
from eagle_plugin.traffic import recorder as module
from eagle_plugin.traffic.frames import Exchange, pack, pack_counts, read_frame
from eagle_plugin.traffic.metrics import PREFIX, CaptureMetrics
from eagle_plugin.traffic.recorder import Recorder, check_writer
from eagle_plugin.traffic.settings import CaptureError, CaptureSettings

READY = json.dumps({"version": eagle_plugin.__version__})
SETTINGS = CaptureSettings("/nowhere")
ONE = Exchange(1.0, b'{"messages": []}', b"x" * 1000)
# Writers of a few lines: they say that they are ready, and then read slowly, not at all, or count.
IDLE = f"import time; print('{READY}', flush=True); time.sleep(600)"
ENDS = f"print('{READY}', flush=True); raise SystemExit(3)"
COUNTS = f"""
import json, sys
from eagle_plugin.traffic.frames import Exchange, read_frame
print('{READY}', flush=True)
records = 0
while (frame := read_frame(sys.stdin.buffer)) is not None:
    records += isinstance(frame, Exchange)
    print(json.dumps({{"records": records, "exchanges": records}}), flush=True)
"""


def make(code: str, totals: list[Counter[str]] | None = None) -> Recorder:
    return Recorder(SETTINGS, (totals if totals is not None else []).append, [sys.executable, "-c", code])


def wait_for(recorder: Recorder, name: str, count: int) -> None:
    end = time.monotonic() + 20
    while recorder.totals()[name] < count:
        assert time.monotonic() < end, recorder.totals()
        time.sleep(0.01)


def test_frames_are_read_as_they_were_packed(tmp_path: Path) -> None:
    known = Exchange(2.5, b"", b"", "/generate", "code", [3, 1])
    frames = pack(ONE) + pack_counts({"dropped:opt_out": 2}) + pack(known)
    path = tmp_path / "frames"
    path.write_bytes(frames)
    with path.open("rb") as file:
        assert [read_frame(file) for _ in range(4)] == [ONE, {"dropped:opt_out": 2}, known, None]
    path.write_bytes(pack(ONE)[:-1])  # the server was killed
    with path.open("rb") as file:
        assert read_frame(file) is None


def test_everything_queued_is_written_before_the_end() -> None:
    shown: list[Counter[str]] = []
    recorder = make(COUNTS, shown)
    for _ in range(100):
        recorder.offer(ONE)
    recorder.drop("opt_out")
    recorder.close(20)
    assert recorder.totals() == shown[-1] == {"records": 100, "dropped:opt_out": 1}
    recorder.offer(ONE)
    assert recorder.totals()["dropped:writer_ended"] == 1


def test_a_full_queue_drops_and_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_BYTES", 50 * len(ONE))
    recorder = make(IDLE)
    big = Exchange(1.0, b"", b"x" * len(ONE) * 40)  # more than a pipe holds, so that the thread waits in it
    recorder.offer(big)
    recorder.offer(big)
    longest = 0.0
    for _ in range(200):
        began = time.monotonic()
        recorder.offer(ONE)
        longest = max(longest, time.monotonic() - began)
    assert 130 < recorder.totals()["dropped:queue_full"] < 200
    assert longest < 0.5
    recorder._process.kill()
    recorder.close(1)


def test_what_is_longer_than_any_answer_is_dropped() -> None:
    recorder = make(IDLE)
    recorder.offer(Exchange(1.0, b"x" * module.LONGEST, b"x"))
    assert recorder.totals() == {"dropped:too_large": 1}
    recorder._process.kill()
    recorder.close(1)


def test_a_writer_that_ends_is_told_once_and_what_comes_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    recorder = make(ENDS)
    for _ in range(3):
        recorder.offer(ONE)
    wait_for(recorder, "dropped:writer_ended", 3)
    recorder.offer(ONE)
    assert recorder.totals() == {"dropped:writer_ended": 4}
    recorder.close(5)
    (record,) = caplog.records
    assert "ended with code 3" in record.message and "the server serves on" in record.message


@pytest.mark.parametrize(
    ("code", "answered"),
    [
        ('print(\'{"error": "no filter here"}\')', "EAGLE_CAPTURE: no filter here"),
        ("raise SystemExit(3)", "ended with code 3 before it was ready"),
        ('print(\'{"version": "0.0.0"}\')', "has eagle-plugin 0.0.0, wanted"),
    ],
)
def test_a_writer_that_cannot_start_is_refused(code: str, answered: str) -> None:
    with pytest.raises(CaptureError, match=answered):
        make(code)


def test_an_interpreter_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("")
    with pytest.raises(CaptureError, match="cannot start .* correct EAGLE_CAPTURE_PYTHON"):
        check_writer(CaptureSettings(str(tmp_path), python=str(tmp_path / "python")))


def test_the_real_writer_refuses_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match="file cannot be written .* set EAGLE_CAPTURE to a folder"):
        check_writer(CaptureSettings(str(tmp_path / "file")))


def test_a_missing_filter_is_refused_with_the_settings_that_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tldextract.py").write_text("raise ImportError('none here', name='tldextract')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(CaptureError, match="needs the Python package tldextract, .* or set EAGLE_CAPTURE_PYTHON to"):
        check_writer(CaptureSettings(str(tmp_path / "folder")))
    assert list((tmp_path / "folder").iterdir()) == []


def test_metrics_count_what_is_new() -> None:
    assert PREFIX == metric_registry.PREFIX
    shown = CaptureMetrics("m")
    for reason in ("queue_full", "write_error", "failed", "writer_ended"):  # deploy/config/alerts.yml
        sample = REGISTRY.get_sample_value("eagle_plugin:capture_dropped_total", {"model_name": "m", "reason": reason})
        assert sample == 0, reason
    shown.update(Counter({"records": 3, "bytes": 900, "dropped:opt_out": 1}))
    shown.update(Counter({"records": 5, "bytes": 900, "dropped:opt_out": 1, "dropped:aborted": 2}))

    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"eagle_plugin:capture_{name}_total", {"model_name": "m"} | labels)

    assert (value("records"), value("bytes"), value("filtered")) == (5, 900, 0)
    assert (value("dropped", reason="opt_out"), value("dropped", reason="aborted")) == (1, 2)
    for metric in shown.made:
        REGISTRY.unregister(metric)
