"""The metrics that both engines export, in one process and shared between processes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest

from eagle_plugin.common.metric_registry import forget
from eagle_plugin.runtime.round_metrics import REJECTED_ROUNDS, RejectionWatch, RoundMetrics

LABELS = ("model_name", "engine")


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"eagle_plugin:{name}", {"model_name": "m", "engine": "0"} | labels)


def test_every_metric_counts() -> None:
    recorder = RoundMetrics(LABELS, 3).labelled("m", "0")
    recorder.record([0, 2, 3, 2], 28)
    recorder.record([1], 7)
    recorder.record_eager(["grammar", "penalties"])
    recorder.record_eager(["grammar"])
    recorder.record_eager([])
    assert value("eager_steps_total", reason="grammar") == 2 and value("eager_steps_total", reason="penalties") == 1
    assert value("verify_rounds_total") == 5 and value("drafted_tokens_total") == 35
    assert value("accepted_tokens_total") == 8
    assert [value("accepted_at_depth_total", depth=str(depth)) for depth in (1, 2, 3, 4)] == [4, 3, 1, None]
    assert [value("accept_length_bucket", le=f"{n}.0") for n in (1, 2, 3, 4)] == [1, 2, 4, 5]
    assert value("accept_length_sum") == 8 + 5 and value("accept_length_count") == 5
    forget()


def test_engines_are_counted_apart() -> None:
    metrics = RoundMetrics(LABELS, 2)
    first, second = metrics.labelled("m", "0"), metrics.labelled("m", "1")
    first.record([1, 1], 6)
    second.record([0], 3)
    assert value("verify_rounds_total") == 2 and value("verify_rounds_total", engine="1") == 1
    assert value("accepted_at_depth_total", depth="1", engine="1") == 0  # shown before anything is accepted
    forget()


def test_a_later_engine_starts_anew() -> None:
    RoundMetrics(LABELS, 3).labelled("m", "0").record([3], 7)
    RoundMetrics(("model_name",), 1).labelled("m")
    text = generate_latest().decode()
    assert 'eagle_plugin:verify_rounds_total{model_name="m"} 0.0' in text
    assert 'depth="2"' not in text and "engine=" not in text
    forget()
    assert "eagle_plugin:" not in generate_latest().decode()


def test_processes_share_their_counts(tmp_path: Path) -> None:
    """As engines do with several processes: what one records, another can show."""
    record = (
        "from eagle_plugin.runtime.round_metrics import RoundMetrics as M; M(['model_name'], 2).labelled('m').record"
    )
    show = (
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "registry = CollectorRegistry(); multiprocess.MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())"
    )
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for kept in ("([1, 2], 14)", "([0], 7)"):
        subprocess.run([sys.executable, "-c", record + kept], env=environment, check=True)
    shown = subprocess.run([sys.executable, "-c", show], env=environment, check=True, capture_output=True, text=True)
    assert 'eagle_plugin:verify_rounds_total{model_name="m"} 3.0' in shown.stdout
    assert 'eagle_plugin:accept_length_bucket{le="2.0",model_name="m"} 2.0' in shown.stdout
    assert 'eagle_plugin:rejected_rounds{model_name="m"} 1.0' in shown.stdout  # of the process that set it last


def test_rounds_without_a_kept_token_in_a_row() -> None:
    recorder = RoundMetrics(LABELS, 3).labelled("m", "0")
    for kept, in_a_row in (([0, 0], 2), ([0], 3), ([0, 1, 0], 0), ([0], 1), ([], 1)):
        recorder.record(kept, 7 * len(kept))
        assert value("rejected_rounds") == in_a_row
    forget()


def test_a_head_whose_drafts_are_all_rejected_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = RejectionWatch("TARGET", "HEAD", logging.getLogger("eagle_plugin"))
    for _ in range(3):  # a draft is kept before the count is full
        watch.record([0] * (REJECTED_ROUNDS - 1))
        watch.record([0, 1])
    assert not caplog.records
    for _ in range(REJECTED_ROUNDS // 2 - 1):
        watch.record([0, 0])
    assert not caplog.records
    for _ in range(2 * REJECTED_ROUNDS):
        watch.record([0])
    (line,) = caplog.messages
    assert f"every draft of {REJECTED_ROUNDS} rounds" in line and "run: eagle-plugin check TARGET HEAD" in line
    causes = ("another target or chat template", "other aux layers", "rope_theta", "d2t", "never trained")
    places = [line.index(cause) for cause in causes]
    assert places == sorted(places)  # the likely ones first
