"""Steps `training`, `model` and `vllm-model` of `make gpu`: what they find wrong, and their small forms on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks.gpu import model_speed, training
from benchmarks.gpu.engine_text import SERVES
from benchmarks.gpu.model_cases import CASES, SAMPLED_CASES, environment, sglang_arguments, vllm_arguments
from benchmarks.gpu.model_process import EngineProcess, started
from benchmarks.gpu.model_speed import FLOAT32, Measured
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

    def __init__(self, name: str, text: list[list[int]], rounds: int) -> None:
        self.case = CASES["sglang"][name]
        self._answer = {"text": text, "tokens": 6, "rounds": rounds, "seconds": 2.0}

    def ask(self, prompts: list[list[int]], temperature: float, tokens: int, forget: bool = False) -> dict[str, Any]:
        return self._answer


PLAIN = Answers("plain-float32", [[1, 2, 3], [4, 5, 6]], 0)


def test_equal_text_passes() -> None:
    ours = Answers("plugin-float32", [[1, 2, 3], [4, 5, 6]], 2)
    assert model_speed.compare(PLAIN, ours, [[1], [2]], TINY)["accept_length"] == 2.0


@pytest.mark.parametrize(
    ("text", "rounds", "message"),
    [
        ([[1, 2, 3], [4, 5, 7]], 2, "^1 of 2 greedy texts in float32 are those of plain decoding, accept length 2.00"),
        ([[1, 2, 3], [4, 5, 6]], 4, "accept length 1.00; wanted nine tenths of the texts and an accept length of 1.2"),
    ],
)
def test_another_text_is_found(text: list[list[int]], rounds: int, message: str) -> None:
    with pytest.raises(StepError, match=message):
        model_speed.compare(PLAIN, Answers("plugin-float32", text, rounds), [[1], [2]], TINY)


def test_rows_and_sentences() -> None:
    engine = Answers("plugin", [[1, 2, 3], [4, 5, 6]], 2)
    found = model_speed.ask_in_groups(engine, [[1], [2]], Measured("plugin", 0.0, 1), 3)
    # Two groups of one question; the fake engine says six tokens in two seconds and two rounds to each.
    assert found == {"tokens_per_s": 3.0, "accept_length": 2.5}
    row = model_speed.as_row(Measured("plugin", 0.0, 8), [found, found | {"tokens_per_s": 5.0}], plain=2.0)
    assert (row["tokens_per_s"], row["lowest"], row["highest"], row["times_plain"]) == (4.0, 3.0, 5.0, 2.0)
    plain = model_speed.as_row(Measured("plain", 1.0, 1), [found | {"accept_length": 0.0}], plain=3.0)
    engines: dict[str, EngineProcess] = {"plugin": engine, "plain": Answers("plain", [], 0)}
    assert model_speed.sentences([row, plain], engines) == [
        "the plugin, trees up to 3/4/16, T = 0, 8 requests: 4 tokens/s, 2.00x plain, accept length 2.50",
        "plain decoding, T = 1, 1 request: 3 tokens/s, 1.00x plain",
    ]


class Starts(Answers):
    """An engine that starts, or does not, or serves by another worker than the plugin's."""

    def __init__(self, name: str, how: str = SERVES) -> None:
        super().__init__(name, [], 0)
        self._how = how

    def log(self) -> str:
        return self._how

    def wait_for_start(self) -> float:
        if self._how == "fails":
            raise StepError(f"{self.case.what} does not answer: see the log")
        return 1.0


def test_which_engines_may_fail() -> None:
    all_start = {name: Starts(name) for name in ("plain", "engine-tree", "plugin", "plugin-chain", *FLOAT32)}
    assert model_speed.wait_for_all(all_start) == (all_start, {})
    fails = all_start | {"engine-tree": Starts("engine-tree", "fails"), "plugin-chain": Starts("plugin-chain", "")}
    engines, failed = model_speed.wait_for_all(fails)
    assert list(engines) == ["plain", "plugin", *FLOAT32] and list(failed) == ["engine-tree", "plugin-chain"]
    assert failed["plugin-chain"].startswith("the plugin, chains of 3 in every round: the plugin does not serve")
    with pytest.raises(StepError, match="^plain decoding does not answer"):
        model_speed.wait_for_all(all_start | {"plain": Starts("plain", "fails")})
    with pytest.raises(StepError, match="^the plugin, trees up to 3/4/16: the plugin does not serve"):
        model_speed.wait_for_all(all_start | {"plugin": Starts("plugin", "SGLang's own worker")})


def test_an_engine_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'ValueError: no such model' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with (
        started("plain", tmp_path, tmp_path, tmp_path, TINY) as engine,
        pytest.raises(StepError, match="^plain decoding does not answer: ValueError: no such model$"),
    ):
        engine.wait_for_start()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_engines_differ_in_speculation_alone(engine: str, tmp_path: Path) -> None:
    arguments = {"sglang": sglang_arguments, "vllm": vllm_arguments}[engine]
    key = {"sglang": "speculative_algorithm", "vllm": "speculative_config"}[engine]
    for case in CASES[engine].values():
        given, variables = arguments(case, tmp_path, tmp_path, True), environment(engine, case, True)
        assert (key in given) == (case.shape is not None) and given["dtype"] == case.dtype
        assert ("TRITON_F32_DEFAULT" in variables) == (case.dtype == "float32")
        assert (variables["EAGLE_PLUGIN"] != "0") == case.plugin
    plain, ours = (arguments(CASES[engine][name], tmp_path, tmp_path, True) for name in ("plain", "plugin"))
    assert {name: ours[name] for name in plain} == plain
    assert set(SAMPLED_CASES[engine]) < set(CASES[engine])
