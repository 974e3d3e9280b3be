"""Batches of SGLang as rounds read them: rotary positions of three axes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")
from toy_engine import ROWS, TABLE

from eagle_plugin.core.shape import Shape
from eagle_plugin.runtime.rng import KeyTable
from eagle_plugin.sglang.batch import BatchReader

SHAPE = Shape(2, 2, 4)


def schedule(inputs: list[Any] | None, b: int = 2) -> Any:
    info = SimpleNamespace(
        temperatures=torch.ones(b, 1),
        top_ks=torch.ones(b, dtype=torch.int32),
        top_ps=torch.ones(b),
        min_ps=torch.zeros(b),
        is_all_greedy=True,
    )
    lengths, rows = torch.tensor([5, 9][:b]), torch.tensor([1, 2][:b])
    return SimpleNamespace(seq_lens=lengths, req_pool_indices=rows, sampling_info=info, multimodal_inputs=inputs)


def test_axes_of_text_after_pictures() -> None:
    """All three move by what a request's pictures take less than they have tokens; rows of padding, and batches after
    this one, have no picture."""
    reader = BatchReader(SHAPE.reach, ROWS, TABLE, KeyTable(ROWS, "cpu", seed=1), has_axes=True)
    pictures = [None, SimpleNamespace(mrope_position_delta=torch.tensor([[-3]]))]
    positions = torch.tensor([5, 6, 9, 10, 0, 0])
    batch = reader.read(SHAPE, schedule(pictures), 3)
    assert batch.rotary_axes(positions).tolist() == [[5, 6, 6, 7, 0, 0]] * 3
    assert batch.shifts is not None
    address = batch.shifts.data_ptr()
    batch = reader.read(SHAPE, schedule(None), 3)
    assert batch.rotary_axes(positions).tolist() == [positions.tolist()] * 3
    assert batch.shifts is not None and batch.shifts.data_ptr() == address, "a captured forward reads it"
    assert reader.padding(SHAPE, 3, True).shifts is not None


def test_targets_without_axes_have_none() -> None:
    reader = BatchReader(SHAPE.reach, ROWS, TABLE, KeyTable(ROWS, "cpu", seed=1))
    batch = reader.read(SHAPE, schedule(None), 2)
    assert batch.shifts is None
    positions = torch.tensor([5, 6, 9, 10])
    assert batch.rotary_axes(positions).tolist() == [positions.tolist()] * 3, "of a head that has them all the same"
