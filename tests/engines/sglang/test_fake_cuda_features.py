"""On fake CUDA tensors: the rows of a round whose hidden states are stored are chosen without a wait for the GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, FakeLibrary, TakenRows, all_on_cuda

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

from sglang_fake_cuda import HIDDEN, SHAPE, B, reader, schedule_batch

from eagle_plugin.core.verify import Accepted
from eagle_plugin.sglang.features import WorkerFeatures

NAMES = [f"r{i}" for i in range(B)]
PADDED = 4


def requests() -> list[Any]:
    return [
        SimpleNamespace(rid=name, sampling_params=SimpleNamespace(custom_params=None), get_fill_ids=lambda: range(64))
        for name in NAMES
    ]


def check(rows: Any, asked: list[str], has_aux: bool) -> None:
    assert all_on_cuda(rows.counts, rows.ids, rows.positions, rows.states, rows.following)
    assert rows.names == asked and len(rows.counts) == len(rows.following) == len(asked)
    assert len(rows.ids) == len(rows.positions) == len(rows.states) == sum(rows.spans)
    assert rows.states.shape[1] == (4 if has_aux else 1) * HIDDEN


@pytest.mark.parametrize("has_aux", [True, False], ids=["", "EAGLE-2"])
@pytest.mark.parametrize("asked", [NAMES[:1], NAMES], ids=len)
def test_rows_of_a_round(library: FakeLibrary, asked: list[str], has_aux: bool) -> None:
    """The batch is padded, as it is where a round is captured."""
    taken: Any = TakenRows(asked)
    inputs = reader().read(SHAPE, schedule_batch(), PADDED)
    index = torch.zeros(PADDED, SHAPE.max_accept_length, dtype=torch.int64, device=CUDA)
    accepted = Accepted(index.int(), index[:, 0].int() + 1, index)
    tokens = torch.zeros(B, SHAPE.width, dtype=torch.int64, device=CUDA)
    features = torch.zeros(PADDED * SHAPE.width, 3 * HIDDEN, device=CUDA)
    last = torch.zeros(PADDED * SHAPE.width, HIDDEN, device=CUDA)
    WorkerFeatures(taken, None, has_aux).round(requests(), inputs, tokens, accepted, features, last)  # type: ignore[arg-type]
    (rows,) = taken.rows
    check(rows, asked, has_aux)
    assert rows.spans == [SHAPE.max_accept_length] * len(asked)


@pytest.mark.parametrize("has_aux", [True, False], ids=["", "EAGLE-2"])
@pytest.mark.parametrize("asked", [NAMES[-1:], NAMES], ids=len)
def test_rows_of_prompts(library: FakeLibrary, asked: list[str], has_aux: bool) -> None:
    taken: Any = TakenRows(asked)
    lens, prefixes = [5 + i for i in range(B)], [3 * i for i in range(B)]
    n = sum(lens)
    last = torch.zeros(n, HIDDEN, device=CUDA)
    output = SimpleNamespace(hidden_states=torch.zeros(n, 3 * HIDDEN, device=CUDA))
    result = SimpleNamespace(logits_output=output, next_token_ids=torch.zeros(B, dtype=torch.int32, device=CUDA))
    batch = SimpleNamespace(reqs=requests(), extend_lens=lens, prefix_lens=prefixes)
    kept: Any = SimpleNamespace(take=lambda: last)
    WorkerFeatures(taken, kept, has_aux).prefill(batch, result)
    (rows,) = taken.rows
    check(rows, asked, has_aux)
    assert rows.spans == [lens[i] for i in map(NAMES.index, asked)]
