"""Norm, activation and rotary kernels against the chains of torch operations that they replace."""

from __future__ import annotations

import os

import pytest
import torch
from eagle_sglang_cpu import elementwise
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import prop

pytestmark = pytest.mark.skipif(os.environ.get("EAGLE_KERNELS") == "torch", reason="then torch does this itself")
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
rows, seeds = st.integers(1, 70), st.integers(0, 2**31 - 1)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """fp32: the order of sums; bf16: one rounding, where a sum falls on the other side of it."""
    return {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 1e-6}


def chain_norm(x, weight, eps, residual):
    wide = x.float()
    if residual is not None:
        wide = wide + residual.float()
    total = wide.to(x.dtype)
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype), total


@prop
@given(rows, st.sampled_from([16, 64, 576, 1152]), dtypes, st.booleans(), seeds)
def test_rms_norm(n, size, dtype, with_residual, seed):
    gen = torch.Generator().manual_seed(seed)
    x = (torch.randn(n, size, generator=gen) * 3).to(dtype)
    weight = (1 + 0.1 * torch.randn(size, generator=gen)).to(dtype)
    residual = torch.randn(n, size, generator=gen).to(dtype) if with_residual else None
    before = x.clone(), None if residual is None else residual.clone()
    out, total = elementwise.rms_norm(x, weight, 1e-5, residual)
    expected, expected_total = chain_norm(x, weight, 1e-5, residual)
    torch.testing.assert_close(out, expected, **tolerance(dtype))
    assert torch.equal(total, expected_total)
    assert torch.equal(x, before[0]) and (residual is None or torch.equal(residual, before[1]))


@prop
@given(rows, st.sampled_from([16, 128, 1536]), dtypes, seeds)
def test_silu_and_mul(n, size, dtype, seed):
    x = (torch.randn(n, 2 * size, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)
    expected = torch.nn.functional.silu(x[:, :size]) * x[:, size:]
    torch.testing.assert_close(elementwise.silu_and_mul(x), expected, **tolerance(dtype))


@prop
@given(rows, st.integers(1, 5), st.sampled_from([(32, 32), (64, 64), (64, 32), (128, 128)]), dtypes, dtypes, seeds)
def test_rotary(n, heads, sizes, dtype, table_dtype, seed):
    size, dim = sizes
    gen = torch.Generator().manual_seed(seed)
    fused = torch.randn(n, (heads + 1) * size, generator=gen).to(dtype)
    q, k = fused.split([heads * size, size], dim=1)  # slices of a projection, as engines pass them
    angles = torch.rand(100, dim // 2, generator=gen) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(table_dtype)
    positions = torch.randint(0, 100, (n,), generator=gen)

    def chain(x):
        x = x.reshape(n, -1, size)
        cos, sin = (part[:, None].to(dtype) for part in cos_sin[positions].chunk(2, dim=-1))
        a, b = x[..., :dim].chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., dim:]], dim=-1).reshape(n, -1)

    for ours, expected in zip(elementwise.rotary(positions, q, k, cos_sin, size), (chain(q), chain(k)), strict=True):
        torch.testing.assert_close(ours, expected, **tolerance(dtype))


def test_what_the_kernels_do_not_support_is_none():
    x = torch.randn(2, 40)  # not a multiple of 16
    assert elementwise.rms_norm(x, torch.ones(40), 1e-5) is None
    assert elementwise.silu_and_mul(x.double()) is None
    assert elementwise.rms_norm(torch.randn(2, 64).bfloat16(), torch.ones(64), 1e-5) is None  # mixed dtypes


def test_a_position_outside_the_table_is_refused():
    q = torch.randn(1, 64)
    with pytest.raises(ValueError, match=r"positions\[0\] is 7, wanted 0 to 6"):
        elementwise.rotary(torch.tensor([7]), q, q, torch.zeros(7, 64), 64)
