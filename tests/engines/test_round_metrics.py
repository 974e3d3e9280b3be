"""The metrics that both engines export, in one process and shared between processes."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Histogram, generate_latest

from eagle_plugin.common.metric_registry import forget
from eagle_plugin.runtime.round_metrics import REJECTED_ROUNDS, Recorder, RejectionWatch, RoundMetrics, observe

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


class Counted:
    """Stands for a metric of the client; counts the calls into all of them."""

    calls = 0

    def __init__(self) -> None:
        self._upper_bounds = [1.0, 2.0, 3.0, 4.0, math.inf]
        self._buckets = [self] * 5
        self._sum = self

    def inc(self, amount: float = 1) -> None:
        Counted.calls += 1

    set = observe = inc


@pytest.mark.parametrize(("requests", "most"), [(4, 14), (256, 14)])
def test_the_client_is_called_by_length_and_not_by_request(requests: int, most: int) -> None:
    """The calls are made between two rounds."""
    metrics = [Counted() for _ in range(4)]
    recorder = Recorder(*metrics, [Counted() for _ in range(3)], Counted(), lambda reason: Counted())
    before = Counted.calls
    recorder.record([n % 4 for n in range(requests)], 7 * requests)
    assert 10 < Counted.calls - before <= most


@pytest.mark.parametrize("is_known", [True, False])
def test_many_observations_at_once_are_as_many_of_one(is_known: bool) -> None:
    """Also with a client whose values are called otherwise."""
    found = []
    for at_once in (True, False):
        registry = CollectorRegistry()
        histogram = Histogram("length", "", ["engine"], buckets=range(1, 4), registry=registry).labels("0")
        given = histogram if is_known else SimpleNamespace(observe=histogram.observe)
        for amount, times in ((1, 3), (3, 2), (4, 5)):
            if at_once:
                observe(given, amount, times)
            else:
                [histogram.observe(amount) for _ in range(times)]
        shown = generate_latest(registry).decode().splitlines()
        found.append([line for line in shown if "_created" not in line])
    assert found[0] == found[1] and 'length_count{engine="0"} 10.0' in found[0]


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


def test_an_mtp_layer_whose_drafts_are_all_rejected(caplog: pytest.LogCaptureFixture) -> None:
    watch = RejectionWatch("TARGET", None, logging.getLogger("eagle_plugin"))
    watch.record([0] * REJECTED_ROUNDS)
    (line,) = caplog.messages
    assert "the weights of the MTP layer in TARGET are damaged" in line and "None" not in line
