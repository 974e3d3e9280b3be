"""Step `training` of `make gpu`: what it finds wrong, and its small form on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from benchmarks.gpu import training
from benchmarks.gpu.steps import Setting, StepError
from eagle_plugin.learning.train.attention import Packing

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
