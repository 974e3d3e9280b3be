"""The tree kernels against the oracles; equality is exact except for rounding in the log-softmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import prop, random_parents

from eagle_plugin.core import links
from eagle_plugin.core import tree as oracle
from eagle_plugin.kernels import tree as kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@prop
@given(
    st.integers(0, 2**31),
    st.integers(0, 4),
    st.one_of(st.integers(1, 300), st.sampled_from([8191, 8192, 8193, 20000])),
    st.integers(1, 128),
    st.sampled_from(DTYPES),
    st.sampled_from(["normal", "ties", "special"]),
)
def test_topk_log_softmax(seed: int, rows: int, vocab: int, k: int, dtype: torch.dtype, kind: str) -> None:
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab + 3, generator=gen) * 5
    if kind == "ties":
        logits = logits.round()
    if kind == "special":
        odd = torch.tensor([-torch.inf, torch.nan, 0.0, -0.0, 6e-8, 1e-5, 60000.0])
        pick = torch.randint(0, 40, logits.shape, generator=gen)
        logits = torch.where(pick < 7, odd[pick.clamp(max=6)], logits)
    logits = logits.to(dtype)[:, :vocab]  # rows of a wider matrix
    k = min(k, vocab)
    logp, index = kernels.topk_log_softmax(logits, k)
    wanted, wanted_index = oracle.topk_log_softmax(logits, k)
    assert torch.equal(index, wanted_index)
    atol = 4e-3 if kind == "special" else 4e-6  # float32 steps by 0.004 at 60000, by 1e-6 at 20
    torch.testing.assert_close(logp, wanted, rtol=1e-6, atol=atol)
    assert bool((logp <= 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 4, 20, 64])
def test_topk_where_one_stretch_has_all_the_best(k: int, dtype: torch.dtype) -> None:
    """The largest logits, full of ties, are all in columns that the same few threads of a block read."""
    gen = torch.Generator().manual_seed(k)
    logits = torch.randn(1, 40000, generator=gen)
    large = torch.arange(40000) % 128 < 16
    logits[:, large] = 9 + torch.randint(0, 3, (1, int(large.sum())), generator=gen).float()
    logits = logits.to(dtype)
    found, wanted = kernels.topk_log_softmax(logits, k), oracle.topk_log_softmax(logits, k)
    assert torch.equal(found[1], wanted[1])
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("value", [-torch.inf, torch.nan, torch.inf])
def test_topk_of_a_broken_head(value: float) -> None:
    logits = torch.full((2, 50), value)
    found, wanted = kernels.topk_log_softmax(logits, 4), oracle.topk_log_softmax(logits, 4)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert bool((found[0] == -torch.inf).all())


@prop
@given(
    st.integers(0, 2**31),
    st.integers(0, 3),
    st.integers(1, 10),
    st.integers(1, 10),
    st.integers(1, 6),
    st.integers(1, 64),
    st.booleans(),
)
def test_levels_and_selection(seed: int, b: int, topk: int, k: int, depth: int, width: int, ties: bool) -> None:
    gen = torch.Generator().manual_seed(seed)
    C = k + (depth - 1) * topk * k
    table, wanted_table = kernels.new_table(b, C), oracle.new_table(b, C)
    frontier: oracle.Frontier | None = None
    offset, rows = 0, 1
    for level in range(1, depth + 1):
        logp = -torch.rand(b, rows, k, generator=gen)
        logp = (logp * 4).round() if ties else logp
        tokens = torch.randint(0, 50000, (b, rows, k), generator=gen)
        here = topk if level < depth else 0
        if (level - 1) * topk + here > 64:
            break
        args = (offset, level, logp, tokens)
        found = kernels.grow_level(table, *args, frontier, here)
        wanted = oracle.grow_level(wanted_table, *args, frontier, here)
        for name, x, y in zip(found._fields, found, wanted, strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y), name
        frontier, offset, rows = found, offset + rows * k, found.tokens.shape[1]
        for name, x, y in zip(table._fields, table, wanted_table, strict=True):
            assert torch.equal(x, y), name
        if rows == 0:
            break
    roots = torch.randint(0, 50000, (b,), generator=gen)
    tree, wanted_tree = kernels.select_tree(table, roots, width), oracle.select_tree(table, roots, width)
    for name, x, y in zip(tree._fields, tree, wanted_tree, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), name


@prop
@given(
    st.integers(0, 2**31),
    st.integers(0, 3),
    st.integers(1, 10),
    st.integers(0, 3),
    st.integers(1, 16),
    st.booleans(),
)
def test_all_levels_at_once(seed: int, b: int, topk: int, more: int, steps: int, ties: bool) -> None:
    """They are what the same kernel writes level by level."""
    gen, k = torch.Generator().manual_seed(seed), topk + more
    steps = min(steps, 1 + 64 // topk)
    rows = 1 + (steps - 1) * topk
    logp = -torch.rand(b, rows, k, generator=gen)
    logp = (logp * 4).round() if ties else logp
    tokens = torch.randint(0, 50000, (b, rows, k), generator=gen)
    found, wanted, by_level = (oracle.new_table(b, rows * k + 2) for _ in range(3))
    kernels.grow_levels(found, steps, topk, logp, tokens)
    oracle.grow_levels(wanted, steps, topk, logp, tokens)
    frontier: oracle.Frontier | None = None
    first, count = 0, 1
    for level in range(1, steps + 1):
        here, keep = slice(first, first + count), topk if level < steps else 0
        of_level = [x[:, here].contiguous() for x in (logp, tokens)]
        frontier = kernels.grow_level(by_level, first * k, level, *of_level, frontier, keep)
        first, count = first + count, topk
    for name, x, y, z in zip(found._fields, found, wanted, by_level, strict=True):
        assert torch.equal(x, y) and torch.equal(x, z), name


def levels(**changes):
    args = dict(
        table=kernels.new_table(2, 20),
        depth=3,
        topk=2,
        logp=torch.zeros(2, 5, 4),
        tokens=torch.zeros(2, 5, 4, dtype=torch.int64),
    )
    kernels.grow_levels(**(args | changes))


def test_argument_checks_of_all_levels(path: str) -> None:
    levels()
    with pytest.raises(ValueError, match=r"tokens has shape \[2, 5, 3\], wanted \[2, 5, 4\]"):
        levels(tokens=torch.zeros(2, 5, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"table.scores has shape \[1, 20\], wanted \[2, \*\]"):
        levels(table=kernels.new_table(1, 20))
    with pytest.raises(ValueError, match="table holds 19 candidates, wanted at least 20: make it larger"):
        levels(table=kernels.new_table(2, 19))
    with pytest.raises(ValueError, match="depth 34 with topk 2 needs 66 draft slots, wanted at most 64"):
        levels(depth=34)
    with pytest.raises(ValueError, match="logp has 5 rows of 4 children per request, wanted 3 of at least 2"):
        levels(depth=2)
    with pytest.raises(ValueError, match="logp has 5 rows of 4 children per request, wanted 9 of at least 4"):
        levels(topk=4)


@prop
@given(st.integers(0, 2**31), st.integers(0, 5), st.integers(1, 70), st.booleans())
def test_sibling_links(seed: int, b: int, width: int, corrupt: bool) -> None:
    gen = torch.Generator().manual_seed(seed)
    parents = random_parents(b, width, gen)
    if corrupt:  # parents after their children, beyond the tree, below -1
        parents += torch.randint(-2, 3, parents.shape, generator=gen).int()
    for found, wanted in zip(kernels.sibling_links(parents), links.sibling_links(parents), strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_a_table_of_thousands() -> None:
    gen = torch.Generator().manual_seed(0)
    logp, tokens = -torch.rand(1, 1, 3000, generator=gen), torch.randint(0, 50000, (1, 1, 3000), generator=gen)
    table, wanted_table = kernels.new_table(1, 3000), oracle.new_table(1, 3000)
    found = kernels.grow_level(table, 0, 1, logp, tokens, None, 60)
    wanted = oracle.grow_level(wanted_table, 0, 1, logp, tokens, None, 60)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    trees = kernels.select_tree(table, tokens[0, 0, :1], 64), oracle.select_tree(table, tokens[0, 0, :1], 64)
    assert all(torch.equal(x, y) for x, y in zip(*trees, strict=True))


def test_values_of_a_corrupt_table_are_refused() -> None:
    table = kernels.new_table(1, 4)
    kernels.grow_level(table, 0, 1, -torch.arange(4.0).view(1, 1, 4), torch.arange(4).view(1, 1, 4), None, 0)
    for parent in (3, 2, 1000000, 2**31 - 1):  # after the child, itself not kept, far outside
        table.parents[0, 2] = parent
        with pytest.raises(ValueError, match="request 0 has a candidate whose parent scores lower or comes after it"):
            kernels.select_tree(table, torch.tensor([0]), 4)


def level(**changes):
    args = dict(
        table=kernels.new_table(2, 20),
        offset=0,
        depth=1,
        logp=torch.zeros(2, 1, 4),
        tokens=torch.zeros(2, 1, 4, dtype=torch.int64),
        previous=None,
        topk=4,
    )
    return kernels.grow_level(**(args | changes))


def test_argument_checks(path: str) -> None:
    level()
    with pytest.raises(TypeError, match=r"tokens is int32, wanted int64: convert it with \.to\(\)"):
        level(tokens=torch.zeros(2, 1, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"tokens has shape \[2, 1, 5\], wanted \[2, 1, 4\]"):
        level(tokens=torch.zeros(2, 1, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"table holds 20 candidates, wanted at least 22 \(offset 18\)"):
        level(offset=18)
    with pytest.raises(ValueError, match="depth 17 with topk 4 needs draft slots up to 68, wanted at most 64"):
        level(depth=17)
    with pytest.raises(ValueError, match="logp has 2 rows per request, wanted 1 without a previous frontier"):
        level(logp=torch.zeros(2, 2, 2), tokens=torch.zeros(2, 2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"previous.candidates has shape \[2, 4\], wanted \[2, 1\]"):
        level(previous=level())
    with pytest.raises(ValueError, match="width is 65, wanted 1 to 64"):
        kernels.select_tree(kernels.new_table(1, 80), torch.tensor([1]), 65)
    with pytest.raises(ValueError, match=r"table.scores has shape \[2, 20\], wanted \[1, \*\]"):
        kernels.select_tree(kernels.new_table(2, 20), torch.tensor([1]), 4)
    with pytest.raises(ValueError, match=r"k is 9 for logits of shape \[1, 8\]"):
        kernels.topk_log_softmax(torch.zeros(1, 8), 9)
    with pytest.raises(TypeError, match="logits is torch.float64"):
        kernels.topk_log_softmax(torch.zeros(1, 8, dtype=torch.float64), 2)
    with pytest.raises(TypeError, match="parents is int64, wanted int32"):
        kernels.sibling_links(torch.zeros(1, 4, dtype=torch.int64))
