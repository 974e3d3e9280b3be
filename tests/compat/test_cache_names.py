"""The slot bookkeeping that SGLang imports from sgl_kernel, against slow Python."""

import pytest
import sgl_kernel
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("path")
WIDTH = 40


@st.composite
def requests(draw, spare: int = 0):
    """A slot table, and per request a distinct row and a range of it that leaves `spare` positions after it."""
    b = draw(st.integers(0, 5))
    pool = draw(st.integers(b, 8).filter(bool))
    rows = draw(st.permutations(range(pool)))[:b]
    start = [draw(st.integers(0, WIDTH - spare)) for _ in range(b)]
    end = [draw(st.integers(s, WIDTH - spare)) for s in start]
    seed = draw(st.integers(0, 1 << 30))
    table = torch.randint(0, 1000, (pool, WIDTH), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    lens_dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    as_lens = [torch.tensor(x, dtype=lens_dtype) for x in (start, end)]
    return table, torch.tensor(rows, dtype=torch.int64), *as_lens


def entries(rows, start, end):
    return [(r, p) for r, s, e in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True) for p in range(s, e)]


@settings(deadline=None)
@given(requests())
def test_assign_req_to_token_pool_writes_each_range(case):
    table, rows, start, end = case
    at = entries(rows, start, end)
    expected = table.clone()
    for slot, (row, position) in enumerate(at, start=5000):
        expected[row, position] = slot
    slots = torch.arange(5000, 5000 + len(at))
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, start, end, slots, WIDTH)
    assert torch.equal(table, expected)


@settings(deadline=None)
@given(requests(), st.integers(0, 3))
def test_assign_extend_cache_locs_reads_each_range(case, spare):
    table, rows, start, end = case
    at = entries(rows, start, end)
    out = torch.full((len(at) + spare,), -7)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table, start, end, out, WIDTH)
    assert out.tolist() == [int(table[row, position]) for row, position in at] + [-7] * spare


@settings(deadline=None)
@given(requests(spare=12), st.integers(1, 4), st.integers(1, 3))
def test_draft_cache_locs_follow_the_committed_tokens(case, topk, steps):
    table, rows, lens, _ = case
    out = torch.full((len(rows) * topk * steps,), -7)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(rows, table, lens, out, WIDTH, topk, steps)
    assert out.tolist() == [int(table[row, p]) for row, p in entries(rows, lens, lens + topk * steps)]


@settings(deadline=None)
@given(requests(spare=12), st.integers(1, 4), st.integers(1, 3))
def test_draft_metadata_gives_each_beam_slot_its_own_draft_slots(case, topk, steps):
    table, rows, lens, _ = case
    out = sgl_kernel.build_draft_decode_metadata_cpu(table, rows, lens, topk, steps, WIDTH)
    assert out.dtype == torch.int32 and out.shape[0] == len(rows) * topk
    for i, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        for k in range(topk):
            own = length + k * steps
            expected = table[row, :length].tolist() + table[row, own : own + steps].tolist()
            assert out[i * topk + k, : length + steps].tolist() == expected


@settings(deadline=None)
@given(st.integers(0, 4), st.integers(1, 5), st.data())
def test_bonus_is_the_last_accepted_token(b, max_accept_length, data):
    tokens = torch.arange(b * max_accept_length, dtype=torch.int32).view(b, max_accept_length) * 3
    lengths = [data.draw(st.integers(1, max_accept_length)) for _ in range(b)]
    bonus = torch.full((b,), -7, dtype=torch.int32)
    sgl_kernel.fill_bonus_tokens_cpu(tokens, torch.tensor(lengths, dtype=torch.int32), bonus, max_accept_length)
    assert bonus.tolist() == [int(tokens[i, n - 1]) for i, n in enumerate(lengths)]


@settings(deadline=None)
@given(st.lists(st.integers(-1, 9), max_size=20))
def test_accepted_slots_are_packed_to_the_front(index):
    slots = torch.arange(10) * 7 + 1
    out = torch.zeros(len(index), dtype=torch.int64)
    sgl_kernel.fill_accept_out_cache_loc_cpu(torch.tensor(index, dtype=torch.int32), slots, out)
    kept = [i * 7 + 1 for i in index if i >= 0]
    assert out.tolist() == kept + [0] * (len(index) - len(kept))


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), max_size=5), st.booleans(), st.data())
def test_rotate_shifts_left_and_appends(lens, selected, data):
    ids = torch.arange(100, 100 + sum(lens))
    start = [sum(lens[:i]) for i in range(len(lens))]
    new = torch.arange(len(lens))
    at = [data.draw(st.integers(s, max(s, s + n - 1))) for s, n in zip(start, lens, strict=True)]
    expected = ids.tolist()
    for i, (s, n) in enumerate(zip(start, lens, strict=True)):
        if n:
            expected[s : s + n] = expected[s + 1 : s + n] + [expected[s + n - 1]]
            expected[at[i] if selected else s + n - 1] = i
    select = torch.tensor(at, dtype=torch.int64) if selected else None
    lens32 = torch.tensor(lens, dtype=torch.int32)  # the engine's extend lengths are int32
    sgl_kernel.rotate_input_ids_cpu(ids, torch.tensor(start, dtype=torch.int32), lens32, new, select)
    assert ids.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pointer_dtype", [torch.uint64, torch.int64])
@settings(deadline=None)
@given(data=st.data())
def test_copy_reads_every_source_before_it_stores(dtype, pointer_dtype, data):
    caches = [torch.randn(12, *shape).to(dtype) for shape in ((2, 3), (1, 5), (4,))]
    expected = [cache.clone() for cache in caches]
    to = data.draw(st.lists(st.integers(0, 11), unique=True, max_size=8))
    source = [data.draw(st.integers(0, 11)) for _ in to]
    for cache in expected:
        cache[to] = cache[source].clone()
    pointers = torch.tensor([cache.data_ptr() for cache in caches], dtype=pointer_dtype)
    strides = torch.tensor([cache.stride(0) * cache.element_size() for cache in caches])
    targets = torch.tensor(to, dtype=torch.int64)
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, targets, torch.tensor(source, dtype=torch.int64))
    assert all(map(torch.equal, caches, expected))


@pytest.mark.parametrize("name", ["assign_req_to_token_pool_cpu", "assign_extend_cache_locs_cpu"])
@pytest.mark.parametrize(
    "row, start, end, room", [(2, 0, 3, 3), (0, 8, 11, 3), (0, -1, 2, 3), (0, 3, 2, 3), (0, 0, 4, 3)]
)
def test_ranges_outside_the_table_are_refused(name, row, start, end, room):
    table = torch.zeros(2, 10, dtype=torch.int32)
    one = [torch.tensor([x]) for x in (row, start, end)]
    with pytest.raises(ValueError, match="wanted"):
        getattr(sgl_kernel, name)(one[0], table, one[1], one[2], torch.zeros(room, dtype=torch.int64), 10)


def test_a_slice_of_the_table_is_refused():
    rows = lens = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="pool_len is 9, wanted the width of req_to_token, 10"):
        sgl_kernel.build_draft_decode_metadata_cpu(torch.zeros(2, 10, dtype=torch.int32), rows, lens, 1, 1, 9)


def test_draft_slots_beyond_the_table_are_refused():
    rows, lens = torch.zeros(1, dtype=torch.int64), torch.full((1,), 8)
    with pytest.raises(ValueError, match="wanted|leave"):
        sgl_kernel.build_draft_decode_metadata_cpu(torch.zeros(2, 10, dtype=torch.int32), rows, lens, 2, 2, 10)
