"""Values of the host on their way to a GPU: pinned, whether they are in a list or in an array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle_plugin.runtime.host_to_device import to_device, values_to_device

CUDA = torch.device("cuda")


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What was pinned and then copied without a wait, on a machine that says that it has a GPU."""
    found: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        found.append(tensor.clone())
        return found[-1]

    def copy(tensor: Tensor, device: Any, non_blocking: bool = False) -> Tensor:
        assert device == CUDA and non_blocking
        assert any(tensor is one for one in found), "copied from pageable memory"
        return tensor

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", copy)
    return found


@pytest.mark.parametrize("values", [[1, 2, 3], np.array([1, 2, 3], np.int32), np.array([1, 2, 3])[::1]])
def test_lists_and_arrays_are_pinned(values: Any, pinned: list[Tensor]) -> None:
    found = values_to_device(values, torch.int64, CUDA)
    assert found.dtype == torch.int64 and found.tolist() == [1, 2, 3] and len(pinned) == 1


def test_several_arrays_go_in_one_copy(pinned: list[Tensor]) -> None:
    a, b, c = np.arange(6, dtype=np.int32).reshape(2, 3), np.array(7), np.zeros((0, 4), np.int64)
    found = to_device([a, b, c], CUDA)
    assert [part.tolist() for part in found] == [a.tolist(), 7, []] and len(pinned) == 1
    assert all(part.dtype == torch.int64 for part in found)


def test_torch_pins_no_array() -> None:
    """Why the copy is made first: an H200 was the first to say so."""
    with pytest.raises(RuntimeError, match="Can't pin tensor constructed from numpy"):
        torch.tensor(np.arange(3), pin_memory=True)
