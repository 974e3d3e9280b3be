"""Attention over the paged cache against the torch oracle, and the oracle against torch's own attention.

Slots that no row may see hold NaN, so that reading one of them shows. Tolerances: float32 2e-5; the others one rounding
of the result (the oracle computes in float32 and rounds once, as the kernel does).
"""

from __future__ import annotations

import os

import pytest
import torch
from attention_cases import Case, oracle, tree_case
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import ancestor_bitmasks, prop, random_parents
from torch import Tensor

from eagle_plugin.kernels import attention, attention_torch

TOLERANCE = {
    torch.float32: dict(rtol=2e-5, atol=2e-5),
    torch.bfloat16: dict(rtol=1 / 100, atol=2e-3),
    torch.float16: dict(rtol=1 / 800, atol=3e-4),
}
if (os.environ.get("EAGLE_TEST_DEVICE") or "cpu").startswith("cuda"):
    # A GPU multiplies the values (here below 5) by weights that were rounded to their dtype, as FlashAttention does.
    TOLERANCE[torch.bfloat16]["atol"], TOLERANCE[torch.float16]["atol"] = 5 / 2**9, 5 / 2**12


shapes = st.tuples(
    st.integers(0, 2**31),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([(16, 16), (64, 64), (80, 48), (128, 128), (256, 16)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([1, 16]),
)
options = st.fixed_dictionaries({"logit_cap": st.sampled_from([0.0, 0.0, 3.0]), "sinks": st.booleans()})
windows = st.sampled_from([-1, -1, 0, 5, 70])
chunks = st.sampled_from([0, 0, 1, 3, 40, 128])


@prop
@given(
    shapes, st.lists(st.integers(0, 300), max_size=3), st.integers(1, 64), st.integers(0, 9), windows, chunks, options
)
def test_tree_attention(shape, prefixes: list[int], R: int, extra: int, window: int, chunk: int, option: dict) -> None:
    case, ancestors, tail, visible = tree_case(shape, prefixes, R, extra, window, chunk)
    q = case.randn(len(prefixes) * R, case.heads, case.k.shape[2])
    option = {"logit_cap": option["logit_cap"], "sinks": case.sinks if option["sinks"] else None, "scale": 0.3}
    args = (q, case.k, case.v, case.table, case.rows, torch.tensor(prefixes, dtype=torch.int64), ancestors)
    found = attention.tree_attention(*args, tail=tail, window=window, chunk=chunk, **option)
    wanted = oracle(case, q, visible, [i * R for i in range(len(prefixes))], torch.empty_like(found), **option)
    torch.testing.assert_close(found, wanted, **TOLERANCE[case.dtype])


@prop
@given(
    shapes,
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 90)), max_size=3),
    windows,
    chunks,
    st.sampled_from(["causal", "all", "mask"]),
    options,
)
def test_extend_attention(shape, lens: list[tuple[int, int]], window: int, chunk: int, kind: str, option: dict) -> None:
    seed, *rest = shape
    case = Case(seed, [p + e for p, e in lens], *rest)
    masks = [torch.rand(e, e, generator=case.gen) < 0.5 for _, e in lens] if kind == "mask" else [None] * len(lens)
    visible = [
        attention_torch.extend_visible(p + e, e, kind == "causal", m, window, case.k.device, chunk)
        for (p, e), m in zip(lens, masks, strict=True)
    ]
    starts, at = [], 1
    for i, (_, e) in enumerate(lens):
        case.write(i, visible[i])
        starts.append(at)
        at += e + i  # rows between the requests belong to nobody
    wide = case.randn(at, case.heads * case.k.shape[2] + 7)
    q = wide[:, 3:-4].unflatten(1, (case.heads, case.k.shape[2]))  # rows of a fused projection
    option = {"logit_cap": option["logit_cap"], "sinks": case.sinks if option["sinks"] else None, "scale": 0.3}
    out = case.randn(at, case.heads, case.v.shape[2])
    wanted = oracle(case, q, visible, starts, out.clone(), **option)
    flat = torch.cat([torch.zeros(0, dtype=torch.bool), *(m.flatten() for m in masks)]) if kind == "mask" else None
    i64 = [torch.tensor(x, dtype=torch.int64) for x in ([p + e for p, e in lens], [e for _, e in lens], starts)]
    args = (q, case.k, case.v, case.table, case.rows, *i64)
    limits = {"window": window, "chunk": chunk}
    found = attention.extend_attention(*args, causal=kind == "causal", mask=flat, out=out, **limits, **option)
    torch.testing.assert_close(found, wanted, **TOLERANCE[case.dtype])


def plain_case(prefixes: list[int], R: int, seed: int = 0, dtype: torch.dtype = torch.float32):
    case, ancestors, tail, visible = tree_case((seed, 3, 3, (64, 64), dtype, 1), prefixes, R, 0, -1)
    return case, ancestors, visible, case.randn(len(prefixes) * R, case.heads, 64)


def attend(case: Case, q: Tensor, prefixes: list[int], ancestors: Tensor, rows: Tensor | None = None) -> Tensor:
    rows = case.rows if rows is None else rows
    args = (q, case.k, case.v, case.table, rows, torch.tensor(prefixes), ancestors)
    return attention.tree_attention(*args, tail=ancestors.shape[1], scale=0.125)


def test_oracle_is_torchs_attention() -> None:
    case, ancestors, visible, q = plain_case([37], 9)
    slots = case.table[case.rows[0], :46].long().clamp(min=0)
    k, v = case.k[slots], case.v[slots]
    found = attention_torch.attend(q, k, v, visible[0], scale=0.125)
    q, k, v = (x.transpose(0, 1)[None].nan_to_num(0.0) for x in (q, k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible[0], scale=0.125, enable_gqa=True)
    torch.testing.assert_close(found, wanted[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_one_wrong_ancestor_bit_changes_that_row_alone() -> None:
    case, ancestors, _, q = plain_case([50], 8)
    ancestors = ancestors | 1  # every row sees the root
    right = attend(case, q, [50], ancestors)
    ancestors[0, 3] ^= 1
    wrong = attend(case, q, [50], ancestors)
    changed = (right != wrong).flatten(1).any(dim=1)
    assert changed.tolist() == [i == 3 for i in range(8)]


def seen_by_definition(parents: list[int], prefix: int, window: int, chunk: int) -> list[list[bool]]:
    """The keys that the nodes of a tree see, from the path of each; parents[0] = -1."""
    rows = []
    for node in range(len(parents)):
        path, up = [], node
        while up >= 0:
            path, up = [up, *path], parents[up]
        position = {at: at for at in range(prefix)} | {prefix + n: prefix + depth for depth, n in enumerate(path)}
        own = position[prefix + node]
        rows.append(
            [
                key in position
                and (window < 0 or own - position[key] <= window)
                and (chunk == 0 or position[key] // chunk == own // chunk)
                for key in range(prefix + len(parents))
            ]
        )
    return rows


@prop
@given(st.integers(0, 2**31), st.integers(0, 40), st.integers(1, 64), windows, st.integers(0, 12))
def test_the_oracle_sees_what_windows_and_chunks_are_defined_to_be(
    seed: int, prefix: int, nodes: int, window: int, chunk: int
) -> None:
    parents = random_parents(1, nodes, torch.Generator().manual_seed(seed))
    ancestors = ancestor_bitmasks(parents)[0]
    wanted = seen_by_definition([-1, *parents[0, 1:].clamp(min=0).tolist()], prefix, window, chunk)
    assert attention_torch.tree_visible(ancestors, prefix, nodes, window, chunk).tolist() == wanted
    mask = ((ancestors[:, None] >> torch.arange(nodes)) & 1).bool()
    found = attention_torch.extend_visible(prefix + nodes, nodes, True, mask, window, mask.device, chunk)
    assert found.tolist() == wanted
    chain = attention_torch.extend_visible(prefix + nodes, nodes, True, None, window, mask.device, chunk)
    assert chain.tolist() == seen_by_definition([*range(-1, nodes - 1)], prefix, window, chunk)


def test_a_chunk_begins_inside_a_tree(path: str) -> None:
    """Positions 14 and 15 are in the chunk of the prefix, 16 and 17 in the next: their rows see themselves alone."""
    case, ancestors, _, q = plain_case([14], 4)
    ancestors[:] = torch.tensor([0b1, 0b11, 0b111, 0b1111])
    table = case.table.clone()
    args = (q, case.k, case.v, table, case.rows, torch.tensor([14]), ancestors)
    before = attention.tree_attention(*args, tail=4, scale=0.125, chunk=16)
    case.k[case.table[case.rows[0], :16].long()] += 1  # the keys of the first chunk
    after = attention.tree_attention(*args, tail=4, scale=0.125, chunk=16)
    assert (before != after).flatten(1).any(dim=1).tolist() == [True, True, False, False]
    assert bool((attention.tree_attention(*args, tail=4, scale=0.125) != after)[2:].any())


def test_a_row_that_sees_nothing_is_zero(path: str) -> None:
    case, ancestors, _, q = plain_case([0], 4)
    ancestors[0, 2] = 0
    found = attend(case, q, [0], ancestors)
    assert bool((found[2] == 0).all())
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_of_a_head_may_lie_side_by_side(path: str, dtype: torch.dtype) -> None:
    case, ancestors, _, q = plain_case([700, 3], 8, dtype=dtype)
    wanted = attend(case, q, [700, 3], ancestors)
    case.k, case.v = torch.cat([case.k, case.v], dim=-1).split([case.k.shape[2], case.v.shape[2]], dim=-1)
    assert torch.equal(attend(case, q, [700, 3], ancestors), wanted)
    lens = torch.tensor([9, 9]), torch.tensor([4, 4]), torch.tensor([0, 4])
    args = (case.table, case.rows[:2], *lens)
    found = attention.extend_attention(q[:8], case.k, case.v, *args, scale=0.125)
    dense = (case.k.contiguous(), case.v.contiguous())
    assert torch.equal(found, attention.extend_attention(q[:8], *dense, *args, scale=0.125))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_depends_neither_on_threads_nor_on_the_batch(dtype: torch.dtype) -> None:
    prefixes = [700, 3, 129]
    case, ancestors, _, q = plain_case(prefixes, 8, dtype=dtype)
    threads = torch.get_num_threads()
    together = attend(case, q, prefixes, ancestors)
    try:
        torch.set_num_threads(2)
        for _ in range(3):
            assert torch.equal(attend(case, q, prefixes, ancestors), together)
    finally:
        torch.set_num_threads(threads)
    for i in range(3):
        one = slice(i, i + 1)
        inputs = (ancestors[one].contiguous(), case.rows[one].contiguous())
        alone = attend(case, q[i * 8 : i * 8 + 8], prefixes[one], *inputs)
        assert torch.equal(alone, together[i * 8 : i * 8 + 8])


def test_argument_checks(path: str) -> None:
    case, ancestors, _, q = plain_case([20, 30], 4)
    good = dict(
        q=q,
        k_cache=case.k,
        v_cache=case.v,
        slot_table=case.table,
        rows=case.rows,
        prefix_lens=torch.tensor([20, 30]),
        ancestors=ancestors,
        tail=4,
        scale=1.0,
    )
    attention.tree_attention(**good)
    broken = [
        (dict(rows=torch.tensor([0, 4])), ValueError, r"rows\[1\] is 4, wanted 0 to 3"),
        (dict(rows=torch.tensor([0, -1])), ValueError, r"rows\[1\] is -1, wanted 0 to 3"),
        (dict(prefix_lens=torch.tensor([20, 32])), ValueError, "request 1 needs 36 positions, wanted 0 to 35"),
        (dict(prefix_lens=torch.tensor([20, -2])), ValueError, "request 1 needs -2 positions"),
        (dict(prefix_lens=torch.tensor([20])), ValueError, r"prefix_lens has shape \[1\], wanted \[2\]"),
        (dict(tail=65), ValueError, "tail is 65, wanted 0 to 64"),
        (dict(chunk=-1), ValueError, "chunk is -1, wanted the tokens of an attention chunk"),
        (dict(k_cache=case.k.bfloat16()), TypeError, "k_cache is bfloat16, wanted float32"),
        (dict(slot_table=case.table.long()), TypeError, "slot_table is int64, wanted int32"),
        (dict(q=q[:7]), ValueError, r"q has shape \[7, 9, 64\], wanted \[8, "),
        (dict(q=q[:, :8].contiguous()), ValueError, "q has 8 heads over 3 key heads, wanted a multiple"),
        (dict(sinks=torch.zeros(8)), ValueError, r"sinks has shape \[8\], wanted \[9\]"),
        (dict(out=torch.zeros(8, 9, 32)), ValueError, r"out has shape \[8, 9, 32\], wanted \[8, 9, 64\]"),
    ]
    for change, error, message in broken:
        with pytest.raises(error, match=message):
            attention.tree_attention(**(good | change))
    table = case.table.clone()
    table[case.rows[1], 5] = case.k.shape[0]
    with pytest.raises(ValueError, match="slot_table names a slot outside the cache"):
        attention.tree_attention(**(good | dict(slot_table=table)))

    new = (case.table, case.rows, torch.tensor([24, 34]), torch.tensor([4, 4]), torch.tensor([0, 4]))
    attention.extend_attention(q, case.k, case.v, *new, scale=1.0)
    with pytest.raises(ValueError, match="request 1 has 4 new tokens of 34 from row 5 of q's 8 rows"):
        attention.extend_attention(q, case.k, case.v, *new[:4], torch.tensor([0, 5]), scale=1.0)
    with pytest.raises(ValueError, match=r"mask has shape \[31\], wanted \[32\]"):
        mask = torch.ones(31, dtype=torch.bool)
        attention.extend_attention(q, case.k, case.v, *new, scale=1.0, mask=mask)
