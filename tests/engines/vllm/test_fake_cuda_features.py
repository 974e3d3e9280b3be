"""On fake CUDA tensors: the rows of a step whose hidden states are stored are chosen without a wait for the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import CUDA, FakeLibrary, TakenRows, all_on_cuda
from vllm_fake_cuda import BATCHES, HIDDEN, NAMES, SHAPE, B, read

from eagle_plugin.core.verify import Accepted
from eagle_plugin.vllm.features import StepFeatures
from eagle_plugin.vllm.step_state import StepState


@pytest.mark.parametrize("has_aux", [True, False], ids=["", "EAGLE-2"])
@pytest.mark.parametrize("asked", [["b"], ["a", "c"], NAMES], ids=len)
@pytest.mark.parametrize("name", BATCHES)
def test_rows_of_a_step(library: FakeLibrary, name: str, asked: list[str], has_aux: bool) -> None:
    counts, lens = BATCHES[name]
    n, accepted = sum(lens), torch.zeros(B, SHAPE.max_accept_length if any(counts) else 1, device=CUDA).long()
    state = StepState(read(counts, lens), NAMES, np.zeros(B, dtype=bool), [], np.array(counts) > 0)
    state.accepted = Accepted(accepted.int(), accepted[:, 0].int() + 1, accepted)
    last, ids = torch.zeros(n, HIDDEN, device=CUDA), torch.zeros(n, dtype=torch.int32, device=CUDA)
    parts = [torch.zeros(n, HIDDEN, device=CUDA)] * 3 if has_aux else [last]
    taken: Any = TakenRows(asked)
    StepFeatures(taken, 64).step(state, ids, ids.long(), parts, last)
    (rows,) = taken.rows
    assert all_on_cuda(rows.counts, rows.ids, rows.positions, rows.states, rows.following)
    assert len(rows.ids) == len(rows.positions) == len(rows.states) == sum(rows.spans)
    assert sorted(rows.names) == sorted(asked) and len(rows.counts) == len(rows.following) == len(asked)
    assert rows.states.shape[1] == (4 if has_aux else 1) * HIDDEN
    longest = SHAPE.max_accept_length
    assert sorted(rows.spans) == sorted(longest if counts[i] else lens[i] for i in map(NAMES.index, asked))
