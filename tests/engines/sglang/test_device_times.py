"""The engine's timers of forwards see our decode rounds (`--enable-forward-pass-metrics` and its device timer)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
from sglang.srt.utils.device_timer import DeviceTimer

from eagle_plugin.sglang import releases
from eagle_plugin.sglang.attention import TreeAttention
from eagle_plugin.sglang.worker import TreeWorker


class Event:
    """A clock in place of that of a GPU."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self) -> None:
        self.time = Event.now

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return end.time - self.time


def batch(idle: bool) -> Any:
    mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: idle)
    return SimpleNamespace(forward_mode=mode, is_extend_in_batch=False)


def test_a_round_is_one_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda *_: SimpleNamespace(Event=Event))
    reported: list[tuple[str, float]] = []
    timer = DeviceTimer(lambda t, category: reported.append((category, t)))
    worker: Any = object.__new__(TreeWorker)
    worker._target_worker = SimpleNamespace(model_runner=SimpleNamespace(device_timer=timer))

    def takes(milliseconds: float) -> str:
        Event.now += milliseconds
        return "result"

    worker._decode = lambda batch, on_publish, barrier: takes(500)
    worker._idle_round = lambda batch: takes(250)
    assert worker.forward_batch_generation(batch(idle=False)) == "result"
    assert reported == [("target_verify", 0.5)]
    worker.forward_batch_generation(batch(idle=True))
    assert reported[1:] == [("idle", 0.25)]
    worker._target_worker.model_runner.device_timer = None  # without these flags
    assert worker.forward_batch_generation(batch(idle=False)) == "result" and len(reported) == 2


def test_lengths_come_to_the_host_for_metrics_that_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    counts_requests = hasattr(SchedulerMetricsReporter, "snapshot_spec_decode_metrics")
    for is_on in (False, True):
        flags = SimpleNamespace(enable_forward_pass_metrics=is_on)
        monkeypatch.setattr(releases, "get_observability", lambda flags=flags: flags)
        assert TreeAttention(None).needs_cpu_seq_lens is (is_on and not counts_requests)
