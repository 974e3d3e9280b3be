"""Steps `training` and `model` of `make gpu`: what they find wrong, and their small forms on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks.gpu import model_speed, training
from benchmarks.gpu.model_engine import CASES, environment, flags
from benchmarks.gpu.model_speed import EngineProcess, Measured
from benchmarks.gpu.steps import Setting, StepError
from eagle_plugin.train.attention import Packing

TINY = Setting("cpu", tiny=True)


def test_heads_learn_the_same() -> None:
    found = training.run(TINY)
    assert [row["kind"] for row in found["compared"]] == ["eagle2", "eagle3", "peagle"]
    # On a CPU both sides are the same computation; bfloat16 is not float32.
    assert all(0.001 < row["device_error"] == row["cpu_error"] < 0.1 for row in found["compared"])
    (row,) = found["speeds"]
    assert row["tokens"] == 256 and row["tokens_per_s"] > 0
    assert found["summary"][1].startswith("a head of tiny's size: ")


def test_wrong_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention whose backward forgets the keys, in the last of the three computations: that on the device."""
    backward, calls = Packing.backward, []

    def forgetful(self: Packing, *arguments: Any) -> Any:
        calls.append(1)
        dq, dk, dv = backward(self, *arguments)
        return dq, dk * (len(calls) <= 2 * 4), dv  # four draft steps

    monkeypatch.setattr(Packing, "backward", forgetful)
    with pytest.raises(StepError, match=r"eagle3: head\.\S* on cpu in bfloat16 is "):
        training.compare("eagle3", training.TINY, TINY)


def test_missing_gradients_are_found() -> None:
    one: dict[str, Tensor] = {}
    with pytest.raises(StepError, match="gradients of"):
        training.distances(one, {"loss": None})  # type: ignore[dict-item]


@pytest.mark.slow
@pytest.mark.matrix
def test_a_real_model_on_a_cpu() -> None:
    found = model_speed.run(TINY)
    assert found["equal"]["equal"] == found["equal"]["texts"] == 4 and not found["failed"]
    measured = [(row["case"], row["temperature"], row["concurrency"]) for row in found["rows"]]
    assert measured == [
        ("plain", 0.0, 1),
        ("plugin", 0.0, 1),
        ("plain", 0.0, 8),
        ("plugin", 0.0, 8),
        ("plain", 1.0, 1),
        ("plugin", 1.0, 1),
    ]
    assert len(found["summary"]) == 1 + len(measured)


class Answers(EngineProcess):
    """An engine that has its answers already."""

    def __init__(self, case: str, text: list[list[int]], rounds: int) -> None:
        self.case, self._answer = case, {"text": text, "tokens": 6, "rounds": rounds, "seconds": 2.0}

    def ask(self, prompts: list[list[int]], parameters: dict[str, Any], flush: bool = False) -> dict[str, Any]:
        return self._answer


@pytest.mark.parametrize(
    ("text", "rounds", "message"),
    [
        ([[1, 2, 3], [4, 5, 6]], 2, None),
        ([[1, 2, 3], [4, 5, 7]], 2, "^1 of 2 greedy texts in float32 are those of plain decoding, accept length 2.00"),
        ([[1, 2, 3], [4, 5, 6]], 4, "accept length 1.00; wanted nine tenths of the texts and an accept length of 1.2"),
    ],
)
def test_another_text_is_found(text: list[list[int]], rounds: int, message: str | None) -> None:
    engines: dict[str, EngineProcess] = {
        "plain-float32": Answers("plain-float32", [[1, 2, 3], [4, 5, 6]], 0),
        "plugin-float32": Answers("plugin-float32", text, rounds),
    }
    if message is None:
        assert model_speed.compare(engines, [[1], [2]], TINY)["accept_length"] == 2.0
    else:
        with pytest.raises(StepError, match=message):
            model_speed.compare(engines, [[1], [2]], TINY)


def test_rows_and_sentences() -> None:
    engine = Answers("plugin", [[1, 2, 3], [4, 5, 6]], 2)
    found = model_speed.ask_in_groups(engine, [[1], [2]], Measured("plugin", 0.0, 1), 3)
    # Two groups of one question; the fake engine says six tokens in two seconds and two rounds to each.
    assert found == {"tokens_per_s": 3.0, "accept_length": 2.5}
    row = model_speed.as_row(Measured("plugin", 0.0, 8), [found, found | {"tokens_per_s": 5.0}], plain=2.0)
    assert (row["tokens_per_s"], row["spread"], row["times_plain"]) == (4.0, [3.0, 5.0], 2.0)
    plain = model_speed.as_row(Measured("plain", 1.0, 1), [found | {"accept_length": 0.0}], plain=3.0)
    assert model_speed.sentences([row, plain]) == [
        "the plugin, trees up to 3/4/16, T = 0, 8 requests: 4 tokens/s, 2.00x plain, accept length 2.50",
        "plain decoding, T = 1, 1 request: 3 tokens/s, 1.00x plain",
    ]


def test_an_engine_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'ValueError: no such model' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with (
        model_speed.started("plain", tmp_path, tmp_path, tmp_path, TINY) as engine,
        pytest.raises(StepError, match="^plain decoding does not answer: ValueError: no such model$"),
    ):
        engine.wait_for_start()


def test_the_engines_differ_in_speculation_alone(tmp_path: Path) -> None:
    for case in CASES.values():
        given = flags(case, tmp_path, tmp_path, on_gpu=True)
        assert ("speculative_algorithm" in given) == bool(case.speculation)
        assert ("TRITON_F32_DEFAULT" in environment(case, True)) == (given["dtype"] == "float32")
    plain, ours = (flags(CASES[name], tmp_path, tmp_path, on_gpu=True) for name in ("plain", "plugin"))
    assert {key: ours[key] for key in plain} == plain
