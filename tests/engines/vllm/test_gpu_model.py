"""Step `vllm-model` of `make gpu`, in its small form with the real model on a CPU."""

from __future__ import annotations

import pytest

from benchmarks.gpu import model_speed
from benchmarks.gpu.steps import Setting


@pytest.mark.matrix
def test_a_real_model_on_a_cpu() -> None:
    found = model_speed.run(Setting("cpu", tiny=True, engine="vllm"))
    assert found["equal"]["equal"] == found["equal"]["texts"] == 4 and not found["failed"]
    measured = {(row["case"], row["temperature"]): row["accept_length"] for row in found["rows"]}
    assert measured.keys() == {(name, temperature) for name in ("plain", "plugin") for temperature in (0.0, 1.0)}
    assert measured["plain", 0.0] is None and 1 < (measured["plugin", 0.0] or 0) <= 4
