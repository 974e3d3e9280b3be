"""What a launcher asks about its devices: in a process of its own, whose failure is an answer too."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_plugin.kernels import loader
from eagle_plugin.runtime.gpu import Gpu
from eagle_plugin.selftest import launch, record, suite
from eagle_plugin.selftest.launch import ANSWERED, Answer, answer, ask, tell_children, told_by_launcher
from eagle_plugin.selftest.shapes import ModelShape, as_text
from eagle_plugin.selftest.subject import Subject, round_key

SMALL = as_text(ModelShape(heads=4, kv_heads=2, head_dim=32, dtype="float32", vocabulary=512, draft_vocabulary=256))
SUBJECT = Subject("cpu", 2, [32, 32], SMALL, {"layers": 2}, "an engine 1.0")
LOGGER = logging.getLogger("test_launch")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of this test alone; the native kernels are those that are there."""
    kernels = loader.cache_dir()
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "kernels").symlink_to(kernels.resolve())
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path))


def test_the_process_tests_the_kernels_once() -> None:
    first = ask(SUBJECT)
    assert first.reasons == [] and [line for line in first.log if "the self-test of the kernels passed in" in line]
    assert ask(SUBJECT) == Answer([], [])  # from the record
    (kept,) = record.folder().glob("kernels-*.json")
    assert kept.is_file()


@pytest.mark.parametrize(
    ("command", "seconds", "wanted"),
    [
        ([sys.executable, "-c", "raise SystemExit(3)"], 60, "ended with exit code 3"),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"], 60, "ended with exit code -11"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], 0.5, "did not end within 0 s"),
        (["/no/such/python"], 60, "could not be started: "),
    ],
)
def test_a_process_that_fails_is_a_reason(command: list[str], seconds: float, wanted: str) -> None:
    (reason,) = ask(SUBJECT, command, seconds).reasons
    assert reason.startswith("the self-test of the kernels ") and wanted in reason


def test_a_round_that_failed_before_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "run", lambda *_: suite.Report([]))
    assert answer(SUBJECT, LOGGER) == []
    record.write(round_key(SUBJECT, "cpu"), ["a tree differs"], 1.0)
    (reason,) = answer(SUBJECT, LOGGER)
    assert reason == "the self-test failed: a tree differs; after a repair run: eagle-plugin selftest --again"
    other = SUBJECT._replace(real_round={"layers": 3})
    assert answer(other, LOGGER) == []


def test_an_answer_is_told_to_other_processes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this one a round may have failed since then; records of another folder may say something else."""
    monkeypatch.delenv(ANSWERED, raising=False)
    assert told_by_launcher(SUBJECT) is None
    tell_children(SUBJECT, ["a GPU is too old"])
    monkeypatch.setenv(ANSWERED, os.environ[ANSWERED])  # so that it ends with this test
    assert told_by_launcher(SUBJECT) is None
    child = (
        "import json, sys; from eagle_plugin.selftest.launch import Subject, told_by_launcher; "
        "print(json.dumps(told_by_launcher(Subject(**json.load(sys.stdin)))))"
    )

    def told(subject: Subject, **environment: str) -> Any:
        given, variables = json.dumps(subject._asdict()), os.environ | environment
        done = subprocess.run([sys.executable, "-c", child], input=given, capture_output=True, text=True, env=variables)
        return json.loads(done.stdout)

    assert told(SUBJECT) == [["a GPU is too old"], []]
    assert told(SUBJECT._replace(devices=3)) is None
    assert told(SUBJECT, EAGLE_CACHE_DIR=str(tmp_path / "other")) is None


class _On:
    """Stands in for ``torch.cuda.device``: which device is the current one."""

    now = -1

    def __init__(self, device: torch.device) -> None:
        self.index = device.index

    def __enter__(self) -> None:
        _On.now = self.index

    def __exit__(self, *_: object) -> None:
        _On.now = -1


@pytest.mark.parametrize(
    ("capabilities", "wanted"),
    [
        ([(9, 0), (9, 0)], []),
        ([(9, 0), (7, 5)], ["device GPU 1: compute capability 7.5, at least 8.0 is served"]),
        ([(7, 5), (7, 5)], [f"device GPU {i}: compute capability 7.5, at least 8.0 is served" for i in range(2)]),
    ],
)
def test_every_gpu_of_the_server_is_asked(
    capabilities: list[Any], wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tested: list[torch.device] = []
    monkeypatch.setattr(launch.torch.cuda, "device", _On)
    monkeypatch.setattr(Gpu, "current", lambda: Gpu(f"GPU {_On.now}", capabilities[_On.now], True, True, ""))
    monkeypatch.setattr(record, "device_key", lambda device: {"device": f"{device}"})
    monkeypatch.setattr(record, "sources_digest", lambda kind: "")
    monkeypatch.setattr(suite, "run", lambda device, model: tested.append(device) or suite.Report([]))
    assert answer(SUBJECT._replace(device="cuda"), LOGGER) == wanted
    assert tested == [torch.device("cuda", i) for i in range(2) if capabilities[i] >= (8, 0)]
