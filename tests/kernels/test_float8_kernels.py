"""Caches of 8-bit floats: attention over them and what is written to them, against torch.

Every bit pattern occurs in them but NaN, which is in the slots that no row may see.
"""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, oracle, tree_case
from float8_bits import random_bits
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import prop
from torch import Tensor

from eagle_plugin.core import verify
from eagle_plugin.kernels import attention, attention_torch, kv
from eagle_plugin.kernels.float8 import FLOAT8, quantised

TOLERANCE = {
    torch.float32: dict(rtol=2e-5, atol=2e-5),
    torch.bfloat16: dict(rtol=1 / 100, atol=2e-3),
    torch.float16: dict(rtol=1 / 800, atol=3e-4),
}
K_SCALE, V_SCALE = torch.tensor([0.004]), torch.tensor([0.009])
E4M3, E5M2 = FLOAT8
shapes = st.tuples(
    st.integers(0, 2**31),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([(16, 16), (64, 64), (80, 48), (128, 128)]),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from([1, 16]),
)
options = st.fixed_dictionaries({"logit_cap": st.sampled_from([0.0, 3.0]), "sinks": st.booleans()})


def scales_of(stored: torch.dtype) -> dict[str, Tensor]:
    """With which the largest number of a cache is about 2 or 4."""
    by = torch.finfo(E4M3).max / torch.finfo(stored).max
    return {"k_scale": K_SCALE * by, "v_scale": V_SCALE * by}


@prop
@given(
    shapes,
    st.sampled_from(FLOAT8),
    st.lists(st.integers(0, 200), max_size=3),
    st.integers(1, 64),
    st.sampled_from([-1, 5, 70]),
    options,
)
def test_tree_attention(shape, stored: torch.dtype, prefixes: list[int], R: int, window: int, option: dict) -> None:
    case, ancestors, tail, visible = tree_case(shape, prefixes, R, 3, window, stored=stored)
    q = case.randn(len(prefixes) * R, case.heads, case.k.shape[2])
    option = {"logit_cap": option["logit_cap"], "sinks": case.sinks if option["sinks"] else None, "scale": 0.3}
    option |= scales_of(stored)
    args = (q, case.k, case.v, case.table, case.rows, torch.tensor(prefixes, dtype=torch.int64), ancestors)
    found = attention.tree_attention(*args, tail=tail, window=window, **option)
    wanted = oracle(case, q, visible, [i * R for i in range(len(prefixes))], torch.empty_like(found), **option)
    torch.testing.assert_close(found, wanted, **TOLERANCE[case.dtype])


@prop
@given(
    shapes, st.sampled_from(FLOAT8), st.lists(st.tuples(st.integers(0, 150), st.integers(0, 90)), max_size=3), options
)
def test_extend_attention(shape, stored: torch.dtype, lens: list[tuple[int, int]], option: dict) -> None:
    seed, *rest = shape
    case = Case(seed, [p + e for p, e in lens], *rest, stored=stored)
    device = case.k.device
    visible = [attention_torch.extend_visible(p + e, e, True, None, -1, device) for p, e in lens]
    for i, seen in enumerate(visible):
        case.write(i, seen)
    i64 = torch.tensor([[p + e, e] for p, e in lens], dtype=torch.int64).view(-1, 2).T.contiguous()
    starts = i64[1].cumsum(0) - i64[1]
    q = case.randn(int(i64[1].sum()), case.heads, case.k.shape[2])
    option = {"logit_cap": option["logit_cap"], "sinks": case.sinks if option["sinks"] else None, "scale": 0.3}
    option |= scales_of(stored)
    args = (q, case.k, case.v, case.table, case.rows, i64[0], i64[1], starts)
    found = attention.extend_attention(*args, **option)
    wanted = oracle(case, q, visible, starts.tolist(), torch.empty_like(found), **option)
    torch.testing.assert_close(found, wanted, **TOLERANCE[case.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", FLOAT8)
def test_every_number_is_read_exactly(stored: torch.dtype, dtype: torch.dtype) -> None:
    """A row that sees one key alone gets its value: 448 and the smallest denormal too."""
    bits = torch.arange(256, dtype=torch.uint8).view(stored)
    values = bits[bits.float().isfinite()]
    cache = values[:, None, None].expand(-1, 1, 16).contiguous()
    n = len(values)
    table, lens = torch.arange(n, dtype=torch.int32)[:, None].contiguous(), torch.zeros(n, dtype=torch.int64)
    q, ones = torch.zeros(n, 1, 16, dtype=dtype), torch.ones(n, 1, dtype=torch.int64)
    found = attention.tree_attention(q, cache, cache, table, torch.arange(n), lens, ones, tail=1, scale=1.0)
    assert torch.equal(found[:, 0, 0], values.to(dtype))
    assert {448.0, 2.0**-9} <= set(values.float().tolist()) if stored is E4M3 else 57344.0 in values.float()


def one_tree(stored: torch.dtype = E4M3) -> tuple[tuple[Tensor, ...], int]:
    case, ancestors, tail, _ = tree_case((0, 2, 2, (64, 64), torch.float32, 1), [40], 8, 0, -1, stored=stored)
    q = case.randn(8, case.heads, 64)
    return (q, case.k, case.v, case.table, case.rows, torch.tensor([40]), ancestors), tail


@pytest.mark.parametrize("path", ["native", "torch"], indirect=True)
def test_scales_that_are_ignored_or_exchanged_show(path: str) -> None:
    """Controls: with what a fault would give to the kernel."""
    args, tail = one_tree()
    right = attention.tree_attention(*args, tail=tail, scale=0.3, k_scale=K_SCALE, v_scale=V_SCALE)
    for k_scale, v_scale in ((None, V_SCALE), (K_SCALE, None), (V_SCALE, K_SCALE)):
        wrong = attention.tree_attention(*args, tail=tail, scale=0.3, k_scale=k_scale, v_scale=v_scale)
        assert not torch.allclose(right, wrong, rtol=1e-2, atol=1e-2)
    by = {"scale": 0.3 * float(K_SCALE)}
    torch.testing.assert_close(attention.tree_attention(*args, tail=tail, **by) * V_SCALE, right)


@prop
@given(
    st.integers(0, 2**31),
    st.integers(0, 12),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from(FLOAT8),
    st.booleans(),
    st.sampled_from([1.0, 300.0, 1e-3]),
)
def test_store_kv(seed: int, n: int, dtype: torch.dtype, stored: torch.dtype, scaled: bool, size: float) -> None:
    """Exactly; also what is larger than the largest number, which it becomes."""
    gen = torch.Generator().manual_seed(seed)
    k_cache, v_cache = random_bits(gen, 20, 3, 48, dtype=stored).split([16, 32], dim=-1)
    loc = torch.randperm(20, generator=gen)[:n]
    fused = (torch.randn(n, 3 * 16 + 3 * 32 + 5, generator=gen) * size).to(dtype)  # rows of a fused projection
    k, v = fused[:, 2:50].unflatten(1, (3, 16)), fused[:, 50:146].unflatten(1, (3, 32))
    k_scale, v_scale = (torch.tensor([0.3]), torch.tensor([1.7])) if scaled else (None, None)
    wanted = [x.view(torch.uint8).clone() for x in (k_cache, v_cache)]
    most = torch.finfo(stored).max
    for cache, x, by in ((wanted[0], k, 0.3), (wanted[1], v, 1.7)):
        exact = x.float() / torch.tensor(by if scaled else 1.0)
        cache[loc] = exact.clamp(-most, most).to(stored).view(torch.uint8)
    kv.store_kv(k_cache, v_cache, loc, k, v, k_scale=k_scale, v_scale=v_scale)
    for found, want in zip((k_cache, v_cache), wanted, strict=True):
        assert torch.equal(found.view(torch.uint8), want)
        assert bool(found.float().isfinite().all())


@pytest.mark.parametrize("stored", FLOAT8)
def test_what_was_read_is_written_as_it_was(stored: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8).view(stored)
    assert torch.equal(quantised(bits.float()[bits.float().isfinite()], None, stored), bits[bits.float().isfinite()])
    most = torch.finfo(stored).max
    beyond = torch.tensor([most * 2, -most * 2, most * 1.01, torch.inf, 0.0, -0.0])
    assert quantised(beyond, None, stored).float().tolist() == [most, -most, most, most, 0.0, -0.0]


def test_rows_are_moved_by_their_bytes() -> None:
    """NaN too, which no comparison of numbers finds equal."""
    gen = torch.Generator().manual_seed(0)
    caches = [torch.randint(0, 256, (12, 2, 16), generator=gen, dtype=torch.uint8).view(E4M3) for _ in range(2)]
    window, index = torch.tensor([[4, 9, 6, 2]]), torch.tensor([[0, 2, 3]], dtype=torch.int32)
    wanted = [cache.view(torch.uint8).clone() for cache in caches]
    for cache in wanted:
        verify.compact_rows(cache, window, index, torch.tensor([3], dtype=torch.int32))
    ptrs, row_bytes = torch.tensor([c.data_ptr() for c in caches]), torch.tensor([32, 32])
    kv.compact_kv(ptrs, row_bytes, window, index, torch.tensor([3], dtype=torch.int32), slots=12)
    for found, want in zip(caches, wanted, strict=True):
        assert torch.equal(found.view(torch.uint8), want)


def test_argument_checks(path: str) -> None:
    args, tail = one_tree()
    with pytest.raises(ValueError, match=r"k_scale has shape \[2\], wanted \[1\]"):
        attention.tree_attention(*args, tail=tail, scale=1.0, k_scale=torch.ones(2))
    with pytest.raises(TypeError, match="v_scale is float64, wanted float32"):
        attention.tree_attention(*args, tail=tail, scale=1.0, v_scale=torch.ones(1).double())
    q, k, v, *rest = args
    with pytest.raises(TypeError, match="v_cache is float32, wanted float8_e4m3fn"):
        attention.tree_attention(q, k, v.float(), *rest, tail=tail, scale=1.0)
    with pytest.raises(TypeError, match="v_cache is float8_e4m3fn, wanted float8_e5m2"):
        kv.store_kv(k.view(E5M2), v, torch.tensor([0]), q[:1, :2], q[:1, :2])
    with pytest.raises(ValueError, match="loc names slot 99"):
        kv.store_kv(k, v, torch.tensor([99]), q[:1, :2].contiguous(), q[:1, :2].contiguous())
    with pytest.raises(ValueError, match="a cache of float32 has no scales"):
        kv.store_kv(q, q, torch.tensor([0]), q[:1], q[:1], k_scale=torch.ones(1))
