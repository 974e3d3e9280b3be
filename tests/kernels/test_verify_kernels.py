"""The greedy walk and the cache moves against the oracles; equality is exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import prop, random_parents

from eagle_plugin.core import links
from eagle_plugin.core import verify as oracle
from eagle_plugin.kernels import kv, tree_links, verify


@prop
@given(st.integers(0, 2**31), st.integers(0, 5), st.integers(1, 64), st.integers(1, 9), st.integers(1, 3))
def test_verify_greedy(seed: int, b: int, width: int, max_accept_length: int, words: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, words, (b, width), generator=gen) for _ in range(2))
    parents = random_parents(b, width, gen)
    found, wanted = (
        f(tokens, parents, targets, max_accept_length) for f in (verify.verify_greedy, oracle.verify_greedy)
    )
    for name, x, y in zip(found._fields, found, wanted, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), name


@prop
@given(st.integers(0, 2**31), st.integers(0, 5), st.integers(1, 70), st.booleans())
def test_sibling_links(seed: int, b: int, width: int, corrupt: bool) -> None:
    gen = torch.Generator().manual_seed(seed)
    parents = random_parents(b, width, gen)
    if corrupt:  # parents behind their children, beyond the tree, below -1
        parents += torch.randint(-2, 3, parents.shape, generator=gen).int()
    for found, wanted in zip(tree_links.sibling_links(parents), links.sibling_links(parents), strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_a_corrupt_walk_is_caught() -> None:
    """Negative control: the comparison above sees a single wrong parent, and a cycle cannot hang or leave the tree."""
    tokens, targets = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64)
    parents = torch.tensor([[-1, 0, 1, 2, 3, 4, 5, 6]], dtype=torch.int32)
    right = verify.verify_greedy(tokens, parents, targets, 9)
    assert right.lengths.tolist() == [8]
    parents[0, 4] = -1
    assert not torch.equal(verify.verify_greedy(tokens, parents, targets, 9).index, right.index)
    for wrong in (5, 1000, -7):  # 5: nodes 4 and 5 are each other's parent
        parents[0, 4] = wrong
        found, wanted = (f(tokens, parents, targets, 9) for f in (verify.verify_greedy, oracle.verify_greedy))
        assert torch.equal(found.index, wanted.index)
    parents[0, 0] = 3  # a cycle through the root: the walk still ends at the max_accept_length
    parents[0, 4] = 3
    assert verify.verify_greedy(tokens, parents, targets, 9).lengths.tolist() == [9]


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
    single = caches[0].clone()
    for c in wanted:
        oracle.compact_rows(c, window, index, lengths)
    ptrs = torch.tensor([c.data_ptr() for c in caches])
    row_bytes = torch.tensor([c.stride(0) * c.element_size() for c in caches])
    kv.compact_kv(ptrs, row_bytes, window, index, lengths, slots=slots)
    for found, want in zip(caches, wanted, strict=True):
        assert torch.equal(found, want)
    kv.compact_rows(single, window, index, lengths)
    assert torch.equal(single, wanted[0])


@prop
@given(st.integers(0, 2**31), st.integers(0, 12), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_store_kv(seed: int, n: int, dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(seed)
    k_cache, v_cache = (torch.randn(20, 3, dim, generator=gen).to(dtype) for dim in (16, 32))
    loc = torch.randperm(20, generator=gen)[:n]
    fused = torch.randn(n, 3 * 16 + 3 * 32 + 5, generator=gen).to(dtype)  # rows of a fused projection
    k, v = fused[:, 2:50].unflatten(1, (3, 16)), fused[:, 50:146].unflatten(1, (3, 32))
    wanted = k_cache.index_put((loc,), k), v_cache.index_put((loc,), v)
    kv.store_kv(k_cache, v_cache, loc, k, v)
    assert torch.equal(k_cache, wanted[0])
    assert torch.equal(v_cache, wanted[1])


def test_doors(path: str) -> None:
    tokens, parents = torch.zeros(1, 4, dtype=torch.int64), torch.full((1, 4), -1, dtype=torch.int32)
    verify.verify_greedy(tokens, parents, tokens, 3)
    with pytest.raises(TypeError, match="parents is int64, wanted int32"):
        verify.verify_greedy(tokens, tokens, tokens, 3)
    with pytest.raises(ValueError, match=r"targets has shape \[1, 3\], wanted \[1, 4\]"):
        verify.verify_greedy(tokens, parents, tokens[:, :3].contiguous(), 3)
    with pytest.raises(ValueError, match="max_accept_length is 0, wanted at least 1"):
        verify.verify_greedy(tokens, parents, tokens, 0)

    with pytest.raises(TypeError, match="parents is int64, wanted int32"):
        tree_links.sibling_links(tokens)
    cache = torch.randn(8, 2, 16)
    with pytest.raises(ValueError, match=r"k has shape \[3, 2, 16\], wanted \[2, 2, 16\]"):
        kv.store_kv(cache, cache, torch.tensor([0, 1]), cache[:3], cache[:2])
    with pytest.raises(TypeError, match="v is float64, wanted float32"):
        kv.store_kv(cache, cache, torch.tensor([0, 1]), cache[:2], cache[:2].double())


def test_values_of_wrong_moves_are_refused(path: str) -> None:
    cache = torch.randn(8, 2, 16)
    before = cache.clone()
    ptrs, row = torch.tensor([cache.data_ptr()]), torch.tensor([128])
    window, index = torch.tensor([[4, 5, 6]]), torch.tensor([[0, 2]], dtype=torch.int32)
    two = torch.tensor([2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"index\[0, 1\] is 3, wanted 0 to 2: pass the index of verify_greedy"):
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
