"""Which prompts a capture has, and how long the loop waits for the rest."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from eagle_plugin.learning.data.traffic.segments import SegmentWriter
from eagle_plugin.learning.loop.traffic import answers_counted, recorded_questions, wait_recorded


def record(text: str) -> bytes:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": text}]
    return json.dumps({"v": 1, "id": text, "request": {"messages": turns}, "response": {"text": "x"}}).encode() + b"\n"


def test_a_capture_tells_which_questions_it_has(tmp_path: Path) -> None:
    assert recorded_questions(tmp_path / "none") == set() and answers_counted(tmp_path / "none") == 0
    writer = SegmentWriter(tmp_path, 10**9)
    for text in ("one", "two"):
        writer.append(record(text))
    writer.append(record("three")[:30] + b"\n")  # cut by a kill
    writer.write_counts({"records": 2, "filtered": 1, "dropped:aborted": 3, "bytes": 900})
    assert recorded_questions(tmp_path) == {"one", "two"}
    assert answers_counted(tmp_path) == 6


def test_it_waits_for_a_slow_writer_and_gives_up_on_a_dead_one(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, 10**9)

    def write() -> None:
        for count in range(1, 5):
            time.sleep(0.05)
            writer.write_counts({"records": count})

    thread = threading.Thread(target=write)
    thread.start()
    wait_recorded(tmp_path, 4, patience_s=10, pause_s=0.01)
    assert answers_counted(tmp_path) == 4
    thread.join()
    began = time.monotonic()
    wait_recorded(tmp_path, 5, patience_s=0.1, pause_s=0.01)
    assert 0.1 <= time.monotonic() - began < 5
