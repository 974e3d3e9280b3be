"""What ranks of data-parallel attention agree on before a round, and a round's batch and trees as others pad them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.tree import DraftTree

pytest.importorskip("sglang")
import replica_faults
from sglang.srt.layers.dp_attention import memcpy_cpu

from eagle_plugin.runtime.rng import KeyTable
from eagle_plugin.sglang import data_parallel
from eagle_plugin.sglang.batch import BatchReader

WIDE, NARROW = Shape(3, 4, 16), Shape(2, 2, 4)
Wish = tuple[Shape, int, bool]  # of one rank: shape, requests, whether it can run no other


def agreed(wishes: list[Wish], rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Shape, int]:
    def gather(rows: list[torch.Tensor], mine: torch.Tensor, group: str) -> None:
        assert group == "hosts"
        for row, (shape, b, must) in zip(rows, wishes, strict=True):
            row.copy_(torch.tensor([b, int(must), *shape]))
        assert torch.equal(rows[rank], mine)

    group = SimpleNamespace(world_size=len(wishes), cpu_group="hosts")
    parallel = SimpleNamespace(tp_group=group, attn_dp_size=len(wishes))
    monkeypatch.setattr(data_parallel, "get_parallel", lambda: parallel)
    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    shape, b, must = wishes[rank]
    return data_parallel.SharedRounds().agree(shape, b, must)


@pytest.mark.parametrize(
    ("wishes", "wanted"),
    [
        ([(WIDE, 3, False), (NARROW, 5, False)], (NARROW, 5)),
        ([(WIDE, 3, False), (NARROW, 3, False)], (WIDE, 3)),
        ([(PLAIN, 0, False), (NARROW, 1, False)], (NARROW, 1)),  # the first has no requests
        ([(WIDE, 9, False), (PLAIN, 1, True)], (PLAIN, 9)),
        ([(NARROW, 2, False), (PLAIN, 1, True), (WIDE, 4, False), (PLAIN, 0, False)], (PLAIN, 4)),
    ],
)
def test_all_ranks_agree(wishes: list[Wish], wanted: tuple[Shape, int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [agreed(wishes, rank, monkeypatch) for rank in range(len(wishes))] == [wanted] * len(wishes)


def test_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed([(WIDE, 3, False)], 0, monkeypatch) == (WIDE, 3)


def test_trees_of_fewer_requests_are_padded() -> None:
    roots = torch.tensor([7, 8])
    trees = DraftTree.padding(roots, 4)
    assert trees.padded(2) is trees
    padded = trees.padded(5)
    wanted = DraftTree.padding(torch.tensor([7, 8, 0, 0, 0]), 4)
    assert all(torch.equal(x, y) for x, y in zip(padded, wanted, strict=True))


def test_the_first_requests_of_a_padded_batch() -> None:
    table = torch.arange(60, dtype=torch.int32).view(5, 12)
    reader = BatchReader(6, 4, table, KeyTable(5, "cpu", 1))
    info = SimpleNamespace(
        temperatures=torch.ones(2, 1),
        top_ks=torch.ones(2, dtype=torch.int32),
        top_ps=torch.ones(2),
        min_ps=torch.zeros(2),
        is_all_greedy=True,
    )
    batch = SimpleNamespace(
        seq_lens=torch.tensor([3, 5]), req_pool_indices=torch.tensor([1, 2]), sampling_info=info, multimodal_inputs=None
    )
    padded = reader.read(NARROW, batch, 4)
    own = padded.first(2)
    assert (padded.padded_b, own.padded_b, own.b) == (4, 2, 2) and padded.first(4) is padded
    alone = BatchReader(6, 4, table, KeyTable(5, "cpu", 1)).read(NARROW, batch, 2)
    assert torch.equal(own.prefix_lens, alone.prefix_lens) and torch.equal(own.requests, alone.requests)
    assert torch.equal(own.window(0, 4), alone.window(0, 4)) and own.window(0, 4).is_contiguous()
    assert torch.equal(own.table_rows, alone.table_rows) and len(own.sampling.temperatures) == 2


@pytest.mark.parametrize("offset_src", [True, False])
@pytest.mark.parametrize(("offset", "count"), [(0, 3), (3, 3), (2, 1), (4, 2)])
def test_copies_that_can_be_captured_are_those_of_the_engine(offset: int, count: int, offset_src: bool) -> None:
    long, short = torch.randn(6, 2), torch.randn(3, 2)
    dst, src = (short, long) if offset_src else (long, short)
    wanted, found = dst.clone(), dst.clone()
    start, length = torch.tensor(offset), torch.tensor(count)
    memcpy_cpu(wanted, src, 0, start, length, offset_src)
    replica_faults.copy_rows(found, src, 0, start, length, offset_src)
    assert torch.equal(found, wanted)
