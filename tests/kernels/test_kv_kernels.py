"""The moves in the cache against the oracle; equality is exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import prop

from eagle_plugin.core import verify as oracle
from eagle_plugin.kernels import kv


@prop
@given(
    st.integers(0, 2**31),
    st.integers(0, 3),
    st.integers(1, 16),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_compact_kv(seed: int, b: int, width: int, max_accept_length: int, dtype: torch.dtype) -> None:
    check_moves(seed, b, width, max_accept_length, True, dtype)


@prop
@given(st.integers(0, 2**31), st.integers(0, 3), st.integers(1, 16), st.integers(1, 9))
def test_values_in_any_order_are_moved_as_if_at_once(seed: int, b: int, width: int, max_accept_length: int) -> None:
    check_moves(seed, b, width, max_accept_length, False, torch.float32)


def check_moves(seed: int, b: int, width: int, max_accept_length: int, ascending: bool, dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(seed)
    slots = b * width + 5
    caches = [torch.randn(slots, 2, dim, generator=gen).to(dtype) for dim in (16, 24, 3)]
    window = torch.randperm(slots, generator=gen)[: b * width].view(b, width)
    lengths = torch.randint(0, min(width, max_accept_length) + 1, (b,), generator=gen).int()
    index = torch.full((b, max_accept_length), -1, dtype=torch.int32)
    for i in range(b):
        n = int(lengths[i])
        picked = torch.randperm(width, generator=gen)[:n]
        index[i, :n] = (picked.sort().values if ascending else picked).int()
    wanted = [c.clone() for c in caches]
    for c in wanted:
        oracle.compact_rows(c, window, index, lengths)
    ptrs = torch.tensor([c.data_ptr() for c in caches])
    row_bytes = torch.tensor([c.stride(0) * c.element_size() for c in caches])
    kv.compact_kv(ptrs, row_bytes, window, index, lengths, slots=slots)
    for found, want in zip(caches, wanted, strict=True):
        assert torch.equal(found, want)


@prop
@given(
    st.integers(0, 2**31),
    st.integers(0, 12),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
)
def test_store_kv(seed: int, n: int, dtype: torch.dtype, side_by_side: bool) -> None:
    gen = torch.Generator().manual_seed(seed)
    k_cache, v_cache = torch.randn(20, 3, 48, generator=gen).to(dtype).split([16, 32], dim=-1)
    if not side_by_side:
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
    loc = torch.randperm(20, generator=gen)[:n]
    fused = torch.randn(n, 3 * 16 + 3 * 32 + 5, generator=gen).to(dtype)  # rows of a fused projection
    k, v = fused[:, 2:50].unflatten(1, (3, 16)), fused[:, 50:146].unflatten(1, (3, 32))
    wanted = k_cache.clone().index_put((loc,), k), v_cache.clone().index_put((loc,), v)
    kv.store_kv(k_cache, v_cache, loc, k, v)
    assert torch.equal(k_cache, wanted[0])
    assert torch.equal(v_cache, wanted[1])


def test_argument_checks(path: str) -> None:
    cache = torch.randn(8, 2, 16)
    with pytest.raises(ValueError, match=r"k has shape \[3, 2, 16\], wanted \[2, 2, 16\]"):
        kv.store_kv(cache, cache, torch.tensor([0, 1]), cache[:3], cache[:2])
    with pytest.raises(TypeError, match="v is float64, wanted float32"):
        kv.store_kv(cache, cache, torch.tensor([0, 1]), cache[:2], cache[:2].double())
    with pytest.raises(ValueError, match=r"v_cache has shape \[7, 2, 16\], wanted \[8, 2, \*\]"):
        kv.store_kv(cache, cache[:7], torch.tensor([0, 1]), cache[:2], cache[:2])
    if path == "native":
        with pytest.raises(ValueError, match="v_cache has gaps inside its heads, wanted a contiguous last axis"):
            kv.store_kv(cache, cache.mT.contiguous().mT, torch.tensor([0, 1]), cache[:2], cache[:2])


def test_values_of_wrong_moves_are_refused(path: str) -> None:
    cache = torch.randn(8, 2, 16)
    before = cache.clone()
    ptrs, row = torch.tensor([cache.data_ptr()]), torch.tensor([128])
    window, index = torch.tensor([[4, 5, 6]]), torch.tensor([[0, 2]], dtype=torch.int32)
    two = torch.tensor([2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"index\[0, 1\] is 3, wanted 0 to 2: pass the index of verify_tree"):
        kv.compact_kv(ptrs, row, window, index + torch.tensor([[0, 1]], dtype=torch.int32), two)
    with pytest.raises(ValueError, match=r"lengths\[0\] is 3, wanted 0 to 2"):
        kv.compact_kv(ptrs, row, window, index, two + 1)
    with pytest.raises(ValueError, match="window of request 0 names slot -1, wanted 0 or more"):
        kv.compact_kv(ptrs, row, torch.tensor([[4, 5, -1]]), index, two)
    with pytest.raises(ValueError, match="window of request 0 names slot 8, wanted 0 to 7"):
        kv.compact_kv(ptrs, row, torch.tensor([[4, 5, 8]]), index, two, slots=8)
    with pytest.raises(ValueError, match="loc names slot 8, wanted 0 to 7"):
        kv.store_kv(cache, cache, torch.tensor([0, 8]), cache[:2], cache[:2])
    assert torch.equal(cache, before)
    kv.compact_kv(ptrs, row, window, index, two)
    assert torch.equal(cache[5], before[6])
