"""Rows that the head reads later: each once, in order, where its request's blocks are."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs as Uniform

from eagle_plugin.runtime import deferred_limit
from eagle_plugin.vllm import deferred_extend
from eagle_plugin.vllm.batch import DraftStore, RoundBatch
from eagle_plugin.vllm.deferred_extend import DeferredRows, DeferredTokens, Owner, PlainRows, given_blocks

BLOCK = 4
MANY = 1000  # rows of a forward


class Request(NamedTuple):
    """What is asked of one of vLLM's."""

    block_ids: list[list[int]]


def code(name: str) -> int:
    return ord(name) - ord("a") + 1


def add(kept: DeferredTokens, names: str, positions: list[int], lens: list[int] | None = None, slots: int = 12) -> None:
    """A step whose tokens tell their requests and positions, its features and slots the request.

    Request c is in vLLM's blocks 10 c, 10 c + 1 and so on.
    """
    lens = lens or [1] * len(names)
    owners = torch.tensor([code(name) for name in names]).repeat_interleave(torch.tensor(lens))
    places = torch.cat([torch.arange(first, first + n) for first, n in zip(positions, lens, strict=True)])
    rows = PlainRows((owners * 100 + places).int(), owners[:, None] + torch.zeros(3))
    table = torch.stack([slots_of(code(name), slots) for name in names])
    requests = {name: Request([list(range(10 * code(name), 10 * code(name) + slots // BLOCK))]) for name in names}
    kept.add(list(names), positions, lens, rows, table, requests)


def slots_of(request: int, slots: int) -> torch.Tensor:
    places = torch.arange(slots)
    return ((10 * request + places // BLOCK) * BLOCK + places % BLOCK).int()


def take(kept: DeferredTokens, names: Iterable[Owner]) -> DeferredRows:
    (found,) = kept.take(names, MANY)
    return found


def whole(kept: DeferredTokens) -> bool:
    """Whether every place of the store is free, or holds one row, and those of requests are counted."""
    taken = [place for entry in kept._kept.values() for place in entry.places]
    of_requests = [place for owner, entry in kept._kept.items() if isinstance(owner, str) for place in entry.places]
    assert kept.rows_of_requests == len(of_requests)
    return sorted(taken + kept._free) == list(range(len(kept._features))) and kept.rows == len(taken)


def test_the_rows_of_a_step_read_the_token_after_them() -> None:
    prefix = torch.tensor([7, 0])
    batch = RoundBatch.read(np.array([0, 0]), np.array([1, 3]), ["a", "b"], prefix, DraftStore())
    features = torch.randn(4, 3)
    ids = torch.tensor([5, 20, 21, 22], dtype=torch.int32)
    rows = PlainRows.after(batch, torch.tensor([6, 23]), ids, features)
    assert rows.tokens.tolist() == [6, 21, 22, 23] and rows.tokens.dtype == torch.int32
    assert rows.features is features and batch.host_lens == [1, 3]


def test_each_row_is_taken_once_and_in_order() -> None:
    """A prompt in two chunks, the second beside a request that decodes."""
    kept = DeferredTokens(BLOCK)
    add(kept, "a", [0], [3])
    add(kept, "ba", [7, 3], [1, 2])
    add(kept, "ab", [5, 8])
    add(kept, "b", [9])
    assert len(kept) == 2 and whole(kept)
    found = take(kept, "bxa")
    assert found.positions.tolist() == [7, 8, 9, 0, 1, 2, 3, 4, 5]
    assert found.tokens.tolist() == [207, 208, 209, 100, 101, 102, 103, 104, 105]
    assert found.features.tolist() == [[2.0] * 3] * 3 + [[1.0] * 3] * 6
    requests, seq_lens, lens, starts = (values.tolist() for values in found.rows)
    assert (requests, seq_lens, lens, starts) == ([0, 1], [10, 6], [3, 6], [0, 3])
    assert not kept.take("ab", MANY) and not len(kept) and whole(kept)


def test_every_step_asks_for_the_number_of_rows_and_lists_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hundreds of requests the list would take as long as a large part of a step's launches."""
    kept = DeferredTokens(BLOCK)
    add(kept, "abc", [0, 4, 8], [3, 1, 2])
    named: list[Any] = []
    monkeypatch.setattr(deferred_extend._Kept, "places", property(named.append))
    assert kept.rows_of_requests == 6 and kept.rows == 6 and not named


def test_places_are_used_again() -> None:
    kept = DeferredTokens(BLOCK)
    for step in range(20):
        add(kept, "ab", [step, step])
        if step % 3 == 2:
            assert take(kept, "a").tokens.tolist() == [100 + step - 2, 100 + step - 1, 100 + step]
        if step % 4 == 3:
            assert take(kept, "b").tokens.tolist() == [200 + i for i in range(step - 3, step + 1)]
        assert whole(kept)
    assert len(kept._features) <= 16


def test_what_any_group_of_caches_gets_is_no_longer_the_heads() -> None:
    """The groups share one pool of blocks, and their caches lie over each other."""
    new = NewRequestData(
        req_id="a", prompt_token_ids=[], mm_features=[], sampling_params=None, pooling_params=None,
        block_ids=([1, 2, 3], [7, 8]), num_computed_tokens=BLOCK, lora_request=None,
    )  # fmt: skip
    cached = CachedRequestData(
        req_ids=["b", "c"], resumed_req_ids=set(), new_token_ids=[], all_token_ids={},
        new_block_ids=[([4], [9]), None], num_computed_tokens=[40, 50], num_output_tokens=[1, 1],
    )  # fmt: skip
    step = SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=cached)
    assert given_blocks(step, 0, BLOCK) == ({1}, {2, 3, 4, 7, 8, 9})


def test_a_step_that_was_left_out_stays_a_gap() -> None:
    """Past the drafter's reach vLLM asks for no drafts, for the whole batch."""
    kept = DeferredTokens(BLOCK)
    add(kept, "a", [4], [2])
    add(kept, "a", [7])
    found = take(kept, "a")
    assert found.positions.tolist() == [4, 5, 7] and found.tokens.tolist() == [104, 105, 107]
    requests, seq_lens, lens, starts = (values.tolist() for values in found.rows)
    assert (requests, seq_lens, lens, starts) == ([0, 1], [6, 8], [2, 1], [0, 2])
    assert found.slot_table.tolist() == [slots_of(1, 12).tolist()] * 2 and whole(kept)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_long_readings_are_split(most: int) -> None:
    """A request may be read by several forwards, each over the keys of those before it."""
    kept = DeferredTokens(BLOCK)
    add(kept, "ab", [4, 0], [3, 4])
    found = kept.take("ab", most)
    assert [len(part.tokens) for part in found] == [most] * (7 // most) + [7 % most] * (7 % most > 0)
    assert torch.cat([part.tokens for part in found]).tolist() == [104, 105, 106, 200, 201, 202, 203]
    for part in found:
        for i, (seq_len, n, start) in enumerate(zip(*(x.tolist() for x in part.rows[1:]), strict=True)):
            assert part.positions[start : start + n].tolist() == list(range(seq_len - n, seq_len))
            assert part.slot_table[i].tolist() == slots_of(int(part.tokens[start]) // 100, 12).tolist()
    assert whole(kept)


def test_slot_tables_are_those_of_the_last_step() -> None:
    """A request that was left out of later steps has an older, shorter one."""
    kept = DeferredTokens(BLOCK)
    add(kept, "ab", [4, 4], slots=5)
    add(kept, "b", [5], slots=7)
    assert take(kept, "ab").slot_table.tolist() == [[*slots_of(1, 5).tolist(), 0, 0], slots_of(2, 7).tolist()]


def test_what_is_forgotten_is_not_read_and_others_stay() -> None:
    kept = DeferredTokens(BLOCK)
    add(kept, "abc", [4, 4, 4])
    kept.forget(["a", "unknown"])
    assert not kept.take("a", MANY) and len(kept) == 2
    assert take(kept, "b").tokens.tolist() == [204] and len(kept) == 1 and whole(kept)


@pytest.mark.parametrize(
    ("first", "rows", "left"),
    [(0, 3, 0), (0, 4, 4), (0, 7, 4), (2, 1, 0), (2, 2, 2), (2, 7, 6), (5, 2, 0)],
)
def test_after_the_last_full_block_nobody_finds_a_token(first: int, rows: int, left: int) -> None:
    kept = DeferredTokens(BLOCK)
    add(kept, "ab", [first, first], [rows, rows])
    kept.leave(["a", "unknown"])
    assert kept.rows_of_requests == rows and kept.rows == rows + left and whole(kept)
    assert not kept.take("a", MANY)
    found = kept.take(kept.of_blocks({10, 11, 12}), MANY)
    assert [len(part.tokens) for part in found] == [left] * (left > 0)
    assert len(take(kept, "b").tokens) == rows and whole(kept)


def test_blocks_of_a_request_that_is_gone() -> None:
    """Its second block is used anew before its first and third are found; they are read where they are."""
    kept = DeferredTokens(BLOCK)
    add(kept, "a", [2], [4])
    add(kept, "a", [8], [5])  # vLLM asked for no drafts of two tokens
    kept.leave("a")
    assert [kept.of_blocks({block}) for block in (10, 11, 12, 13)] == [[10], [11], [12], []]
    kept.forget({11, 13, 50})
    add(kept, "b", [0], [3])
    assert kept.rows_of_requests == 3 and kept.rows == 9 and whole(kept)
    (found,) = kept.take(kept.of_blocks({12, 10}), MANY)
    assert found.tokens.tolist() == [102, 103, 108, 109, 110, 111]
    assert found.positions.tolist() == [2, 3, 8, 9, 10, 11]
    assert found.rows.seq_lens.tolist() == [4, 12] and found.rows.lens.tolist() == [2, 4]
    assert found.slot_table.tolist() == [slots_of(1, 12).tolist()] * 2
    assert kept.of_blocks({10, 11, 12}) == [] and whole(kept)


def test_a_block_has_the_rows_of_the_last_request_that_left_it() -> None:
    kept = DeferredTokens(BLOCK)
    for names in ("a", "b"):
        add(kept, names, [0], [4])
        kept._kept[names].slot_table, kept._kept[names].blocks = slots_of(1, 12), [10, 11, 12]  # the same blocks
        kept.leave(names)
    assert take(kept, [10]).tokens.tolist() == [200, 201, 202, 203] and whole(kept)


def test_who_has_rows_in_a_block() -> None:
    """Request a has rows in its second and third block, b in its first."""
    kept = DeferredTokens(BLOCK)
    add(kept, "ab", [6, 0], [3, 4])
    assert [kept.of_blocks({block}) for block in (10, 11, 12, 13, 20, 21)] == [[], ["a"], ["a"], [], ["b"], []]
    assert kept.of_blocks({12, 20, 99}) == ["a", "b"] and kept.of_blocks(set()) == []


def excess(kept: DeferredTokens, n: int) -> list[Owner]:
    """What is read before a step of n rows."""
    return kept.excess(PlainRows(torch.zeros(n, dtype=torch.int32), torch.zeros(n, 3)))


def test_of_too_much_blocks_are_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_limit, "MOST_BYTES", 10 * 3 * 4)  # 10 rows
    kept = DeferredTokens(BLOCK)
    add(kept, "a", [0], [8])
    kept.leave("a")
    assert excess(kept, 2) == []
    add(kept, "b", [0], [2])
    assert excess(kept, 1) == [10]
    assert excess(kept, 9) == [10, 11, "b"]


def test_too_much_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_limit, "MOST_BYTES", 10 * 3 * 4)  # 10 rows
    kept = DeferredTokens(BLOCK)
    assert excess(kept, 10) == []
    add(kept, "abc", [0, 0, 0], [3, 5, 1])
    assert excess(kept, 1) == []
    assert excess(kept, 3) == ["b", "a"]
    take(kept, "".join(map(str, excess(kept, 3))))
    assert excess(kept, 3) == [] and len(kept) == 1


def test_the_store_is_no_larger_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_limit, "MOST_BYTES", 10 * 3 * 4)  # 10 rows
    kept = DeferredTokens(BLOCK)
    for first, n in ((0, 8), (8, 8), (16, 1), (17, 3), (20, 10)):
        kept.take(excess(kept, n), MANY)
        add(kept, "a", [first], [n])
        assert n <= kept.rows <= len(kept._features) <= 10 and whole(kept)
    parts = [torch.zeros(11, 2), torch.zeros(11, 1)]
    assert kept.can_keep([part[:10] for part in parts]) and not kept.can_keep(parts)  # such a step is read at once


SIZES: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
FULL, WINDOW = FullAttentionSpec(**SIZES), SlidingWindowSpec(**SIZES, sliding_window=8)


@pytest.mark.parametrize(
    ("spec", "waits"),
    [
        (FULL, True),
        (FullAttentionSpec(**SIZES, sliding_window=8), True),  # --disable-hybrid-kv-cache-manager
        (WINDOW, False),
        (ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=8), False),
        (Uniform(block_size=BLOCK, kv_cache_specs={"a": FULL, "b": FULL}), True),
        (Uniform(block_size=BLOCK, kv_cache_specs={"a": WINDOW}), False),
    ],
    ids=["all tokens", "a window without its manager", "a window", "chunks", "several layers", "with a window"],
)
def test_rows_wait_where_their_blocks_stay_their_requests(spec: KVCacheSpec, waits: bool) -> None:
    """vLLM gives blocks before a window to others, who would find keys of the head in them."""
    others = SimpleNamespace(layer_names=["target"], kv_cache_spec=WINDOW if waits else FULL)
    kept = DeferredTokens.of_layers([others, SimpleNamespace(layer_names=["head"], kv_cache_spec=spec)], {"head"})
    assert kept.can_wait == waits and kept.block_size == BLOCK
