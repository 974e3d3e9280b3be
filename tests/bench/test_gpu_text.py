"""Step `text` of `make gpu`: what it asks, what it finds wrong, and its small form with a real SGLang on a CPU."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import engine_text
from benchmarks.gpu.engine_case import CASES, LARGEST_GRAPH, asks, environment, flags
from benchmarks.gpu.steps import Setting, StepError

TINY = Setting("cpu", tiny=True)


@pytest.mark.slow
@pytest.mark.matrix
def test_a_real_engine_on_a_cpu() -> None:
    rows = engine_text.run(TINY)["rows"]
    assert [row["case"] for row in rows] == ["plain", "overlap"]
    assert all(row["equal"] == row["texts"] > 50 for row in rows)
    assert any("emulated graphs" in line for line in rows[1]["lines"])


def found(rounds: int) -> dict[str, Any]:
    """The answers of an engine."""
    one = {"text": [[1, 2, 3], [4, 5, 6]], "text_is_plain": True, "seconds": 2.0, "tokens": 6, "rounds": rounds}
    return {"start_seconds": 3.0, "asks": {"one": one, "batch": copy.deepcopy(one)}}


def test_equal_text_passes() -> None:
    row = engine_text.compare(found(4), found(0)["asks"]) | {"what": "x"}
    # Two answers of three tokens each, twice; the first token of each is not from a round.
    assert (row["texts"], row["equal"], row["accept_length"]) == (4, 4, 1.0)
    row = engine_text.compare(found(2), found(0)["asks"]) | {"what": "x"}
    engine_text.check(row, f"EAGLE3 {engine_text.SERVES} (...)")
    assert engine_text.as_sentence(row) == (
        "x: 4 of 4 texts equal, accept length 2.00, 3 tokens/s for one request, 3 for 8"
    )
    assert "accept length" not in engine_text.as_sentence(
        engine_text.compare(found(0), found(0)["asks"]) | {"what": "x"}
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("text", "x: 1 of 4 texts are not those of plain decoding, first batch 1"),
        ("engine", "x: the plugin does not serve: eagle-plugin 0.1.0: EAGLE3 is served by SGLang's own worker: why"),
        (
            "handed over",
            "x: the plugin does not serve: eagle-plugin 0.1.0: EAGLE3 is served by SGLang's own worker: why",
        ),
        ("rounds", "x: the accept length is 1.0, so equal text proves nothing"),
    ],
)
def test_what_is_wrong_is_found(fault: str, message: str) -> None:
    answers = found(4 if fault == "rounds" else 2)
    if fault == "text":
        answers["asks"]["batch"]["text"][1][2] = 7
    row = engine_text.compare(answers, found(0)["asks"]) | {"what": "x"}
    log = f"eagle-plugin 0.1.0: EAGLE3 {engine_text.SERVES} (...)"
    engine = "eagle-plugin 0.1.0: EAGLE3 is served by SGLang's own worker: why"
    log = {"engine": engine, "handed over": f"{log}\n{engine}"}.get(fault, log)
    with pytest.raises(StepError) as caught:
        engine_text.check(row, log)
    assert str(caught.value) == message


def test_an_engine_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'ValueError: no such model' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(StepError, match="^plain decoding does not answer: ValueError: no such model$"):
        engine_text.ask("plain", tmp_path, TINY)


def test_the_engines_differ_in_what_they_prove(tmp_path: Path) -> None:
    assert environment("plain", True, tmp_path)["EAGLE_PLUGIN"] == environment("engine", True, tmp_path)["EAGLE_PLUGIN"]
    for name, case in CASES.items():
        given = flags(name, tmp_path, on_gpu=True)
        assert ("disable_overlap_schedule" in given) != case.overlap
        assert ("cuda_graph_backend_decode" in given) != case.graphs
        assert ("speculative_algorithm" in given) == (case.shape is not None)
    sizes = [len(ask.prompts) for _, ask in asks(tiny=False)]
    assert min(sizes) < LARGEST_GRAPH < max(sizes) and LARGEST_GRAPH in sizes
