"""What is reserved for a decode step: no page for each branch of a tree, and never less than a round writes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

from engine_signatures import holds, in_order
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_decode

from eagle_plugin.core.shape import Shape
from eagle_plugin.sglang import decode_reserve, plugin
from eagle_plugin.sglang.worker import TreeWorker


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where the server starts; the hook is what the engine calls."""
    monkeypatch.setattr(decode_reserve, "_needed", None)
    engines = allocation_sizing.get_alloc_len_per_decode
    monkeypatch.setattr(allocation_sizing, "get_alloc_len_per_decode", lambda: plugin._slots_of_round(engines))
    yield


def flags(monkeypatch: pytest.MonkeyPatch, shape: Shape, page: int) -> None:
    steps, topk, width = shape
    spec = SimpleNamespace(speculative_algorithm="EAGLE3", speculative_num_steps=steps, speculative_eagle_topk=topk)
    monkeypatch.setattr(allocation_sizing, "get_spec", lambda: spec)
    monkeypatch.setattr(allocation_sizing, "get_schedule", lambda: SimpleNamespace(page_size=page))
    monkeypatch.setattr(allocation_sizing, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))
    monkeypatch.setattr(allocation_sizing, "max_speculative_num_draft_tokens", lambda: width)


def worker(shape: Shape, block: Any = None) -> Any:
    return SimpleNamespace(draft_worker=SimpleNamespace(levels=SimpleNamespace(block=block)), shape=shape)


def test_no_pages_for_branches_once_our_worker_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(5, 4, 16)
    flags(monkeypatch, shape, page=64)
    row = allocation_sizing.get_req_to_token_extra_context_len()
    assert allocation_sizing.get_alloc_reserve_per_decode() == 2 * 2 * 64 * 4  # also for a worker that takes over
    decode_reserve.reserve_for(worker(shape, block=object()))
    assert allocation_sizing.get_alloc_reserve_per_decode() == 1024
    decode_reserve.reserve_for(worker(shape))
    assert allocation_sizing.get_alloc_reserve_per_decode() == 2 * 20 <= row
    flags(monkeypatch, shape, page=1)
    assert allocation_sizing.get_alloc_reserve_per_decode() == 2 * 20, "as before"
    flags(monkeypatch, Shape(5, 1, 6), page=64)
    assert allocation_sizing.get_alloc_reserve_per_decode() == 2 * 6, "as before"


@pytest.mark.parametrize("overlap", [False, True])
def test_every_slot_that_a_round_writes_is_allocated(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap the scheduler knows what the round before the last one has accepted, when it allocates."""
    g = random.Random(1)
    for _ in range(300):
        steps, topk, page = g.randint(1, 12), g.randint(2, 10), g.choice([2, 16, 64, 128])
        shape = Shape(steps, topk, g.randint(2, min(64, 1 + topk + (steps - 1) * topk * topk)))
        flags(monkeypatch, shape, page)
        decode_reserve.reserve_for(worker(shape))
        length = g.randint(1, 300)  # of the prompt
        kv = SimpleNamespace(kv_committed_len=length, kv_allocated_len=-(-length // page) * page)
        known = length
        for _ in range(40):
            kv.kv_committed_len = known
            reserve = allocation_sizing.get_alloc_reserve_per_decode()
            _, (allocated,), _ = allocation_sizing.page_aligned_decode_alloc_lens(
                [SimpleNamespace(kv=kv)], reserve=reserve, page_size=page
            )
            kv.kv_allocated_len = allocated
            assert length + shape.reach <= allocated and allocated % page == 0
            last = shape.max_accept_length if g.random() < 0.7 else g.randint(1, shape.max_accept_length)
            known, length = length if overlap else length + last, length + last


def test_the_scheduler_reserves_and_retracts_by_the_same_number() -> None:
    for function in (eagle_prepare_for_decode, ScheduleBatch._new_tokens_required_next_decode_spec_v2):
        assert holds(function, "get_alloc_reserve_per_decode()")
    assert holds(allocation_sizing.get_alloc_reserve_per_decode, "2 * get_alloc_len_per_decode()")


def test_only_a_worker_that_has_passed_its_test_changes_it() -> None:
    test = "check_rounds(self, repeated or prepared(partial(prepare_rounds, self, mode)))"
    assert in_order(TreeWorker.init_cuda_graphs, [test, "reserve_for(self)"])
