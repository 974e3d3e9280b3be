"""Latent attention (MLA): one key head whose values are the first numbers of each key, against the torch oracle."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, oracle, tree_case
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import EXAMPLES, prop

from eagle_plugin.core.verify import compact_rows
from eagle_plugin.kernels import attention, attention_torch, kv

# As of attention over keys and values (test_attention_kernels.py); sums of 576 products are rounded more often.
TOLERANCE = {
    torch.float32: dict(rtol=5e-5, atol=5e-5),
    torch.bfloat16: dict(rtol=1 / 50, atol=1e-2),
    torch.float16: dict(rtol=1 / 400, atol=2e-3),
}
DEEPSEEK = (576, 512)  # numbers of a key, and of the value in it
fewer = settings(prop, max_examples=max(EXAMPLES // 2, 1))
heads = st.sampled_from([1, 4, 16, 128])
dims = st.sampled_from([DEEPSEEK, DEEPSEEK, (80, 64), (32, 32)])
dtypes = st.sampled_from(list(TOLERANCE))
SCALE = 192**-0.5


@fewer
@given(st.integers(0, 2**31), heads, dims, dtypes, st.lists(st.integers(0, 300), max_size=3), st.integers(1, 40))
def test_tree_attention(
    seed: int, group: int, dim: tuple[int, int], dtype: torch.dtype, prefixes: list[int], R: int
) -> None:
    R = min(R, 8) if group == 128 else R
    case, ancestors, tail, visible = tree_case((seed, 1, group, dim, dtype, 16), prefixes, R, 2, -1, latent=True)
    q = case.randn(len(prefixes) * R, group, dim[0])
    args = (q, case.k, case.v, case.table, case.rows, torch.tensor(prefixes, dtype=torch.int64), ancestors)
    found = attention.tree_attention(*args, tail=tail, scale=SCALE)
    wanted = oracle(case, q, visible, [i * R for i in range(len(prefixes))], torch.empty_like(found), scale=SCALE)
    torch.testing.assert_close(found, wanted, **TOLERANCE[dtype])


@fewer
@given(
    st.integers(0, 2**31), heads, dims, dtypes, st.lists(st.tuples(st.integers(0, 100), st.integers(0, 90)), max_size=3)
)
def test_extend_attention(
    seed: int, group: int, dim: tuple[int, int], dtype: torch.dtype, lens: list[tuple[int, int]]
) -> None:
    case = Case(seed, [p + e for p, e in lens], 1, group, dim, dtype, 16, latent=True)
    visible = [attention_torch.extend_visible(p + e, e, True, None, -1, case.k.device) for p, e in lens]
    starts, at = [], 0
    for i, (_, e) in enumerate(lens):
        case.write(i, visible[i])
        starts.append(at)
        at += e
    q = case.randn(at, group, dim[0])
    new = [torch.tensor(x, dtype=torch.int64) for x in ([p + e for p, e in lens], [e for _, e in lens], starts)]
    found = attention.extend_attention(q, case.k, case.v, case.table, case.rows, *new, scale=SCALE)
    wanted = oracle(case, q, visible, starts, torch.empty_like(found), scale=SCALE)
    torch.testing.assert_close(found, wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("wrong", ["values from the end of the key", "a key without its last part"])
def test_the_comparison_sees(wrong: str) -> None:
    """Controls: other 512 of the 576 numbers as values, and logits without the rotary part."""
    case, ancestors, tail, visible = tree_case((5, 1, 4, DEEPSEEK, torch.float32, 16), [90], 8, 0, -1, latent=True)
    q = case.randn(8, 4, DEEPSEEK[0])
    values, asked = case.v, q
    if wanted_values := wrong.startswith("values"):
        values = case.k[..., -DEEPSEEK[1] :]
    else:
        asked = q.clone()
        asked[..., DEEPSEEK[1] :] = 0
    args = (case.table, case.rows, torch.tensor([90]), ancestors)
    found = attention.tree_attention(asked, case.k, values, *args, tail=tail, scale=SCALE)
    wanted = oracle(case, q, visible, [0], torch.empty_like(found), scale=SCALE)
    assert float((found - wanted).abs().max()) > (0.1 if wanted_values else 0.01)


def test_accepted_rows_are_moved_whole() -> None:
    """One cache of 576 numbers per row, in place of keys and values."""
    gen = torch.Generator().manual_seed(3)
    cache = torch.randn(40, 1, DEEPSEEK[0], generator=gen)
    window = torch.randperm(40, generator=gen).view(4, 10)
    index = torch.tensor([[0, 2, 5, 9], [0, 1, 2, 3], [0, 7, -1, -1], [0, -1, -1, -1]], dtype=torch.int32)
    lengths = torch.tensor([4, 4, 2, 1], dtype=torch.int32)
    wanted = cache.clone()
    compact_rows(wanted, window, index, lengths)
    places = torch.tensor([cache.data_ptr()]), torch.tensor([cache.stride(0) * cache.element_size()])
    kv.compact_kv(*places, window, index, lengths, slots=len(cache))
    assert torch.equal(cache, wanted)
