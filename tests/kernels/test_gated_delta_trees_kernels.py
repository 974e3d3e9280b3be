"""Trees over the states that an engine keeps, by slot, against the oracle that is given the states themselves.

In torch here, in Triton on a GPU, and in Triton's interpreter where TRITON_INTERPRET=1 (`test_triton_interpreter.py`).
Slots that nobody may read hold NaN.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import ancestor_bitmasks, prop, random_parents
from torch import Tensor

from eagle_plugin.kernels import gated_delta, gated_delta_trees
from eagle_plugin.kernels.gated_delta import Caches, Left, Net, Places, Projections, TreePlan

SLOTS = 9
NARROW = {torch.float32: dict(rtol=5e-5, atol=5e-5), torch.bfloat16: dict(rtol=1 / 100, atol=1e-2)}


@pytest.fixture(autouse=True, scope="module")
def _in_the_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from eagle_plugin.kernels import triton_gated_delta

        gated_delta_trees._triton = lambda like: triton_gated_delta


class Case(NamedTuple):
    net: Net
    nodes: Projections
    caches: Caches
    places: Places
    tree: TreePlan
    last: Tensor  # [B]

    @property
    def n(self) -> int:
        return len(self.nodes.a)

    def before(self) -> tuple[Tensor, Tensor]:
        """What the oracle is given: contents of slots, zero where a request has no tokens."""
        past, state = self.caches.pasts[self.places.slots], self.caches.states[self.places.slots]
        if self.places.lengths is None:
            return past, state
        new = self.places.lengths == 0
        return past.masked_fill(new[:, None, None], 0), state.masked_fill(new[:, None, None, None], 0)

    def oracle(self) -> tuple[Tensor, Left]:
        b, width, _ = self.tree.seen.shape
        nodes = (x.view(b, width, x.shape[1]) for x in self.nodes)
        return gated_delta.attend(self.net, *nodes, *self.before(), self.tree)

    def attend(self, room: Left | None = None) -> tuple[Tensor, Left]:
        shape = self.n, self.net.value_heads, self.net.value_dim
        out = torch.full(shape, torch.nan, dtype=self.nodes.mixed_qkv.dtype)
        left = gated_delta_trees.attend_trees(*self[:5], out, room)
        return out.view(*self.tree.seen.shape[:2], *shape[1:]), left

    def commit(self, left: Left) -> None:
        gated_delta_trees.commit_trees(self.net, self.caches, self.places, left, self.tree, self.last)


def make(
    seed: int,
    b: int,
    width: int,
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (8, 6),
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    chain: bool = False,
) -> Case:
    """heads: of keys, and of values for each of them."""
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    (hk, groups), (k, v), taps = heads, dims, 2 + seed % 3
    hv, channels = hk * groups, 2 * hk * k + hk * groups * v
    net = Net(
        key_heads=hk, value_heads=hv, key_dim=k, value_dim=v, weight=draw(channels, taps).to(dtype),
        bias=draw(channels) if seed % 2 else None, a_log=draw(hv), dt_bias=draw(hv),
    )  # fmt: skip
    parents = random_parents(b, width, gen)
    if chain:
        parents = torch.arange(-1, width - 1).expand(b, -1).int()
    tree = gated_delta.plan(ancestor_bitmasks(parents), taps)
    slots = 1 + torch.randperm(SLOTS - 1, generator=gen)[:b]
    lengths = torch.randint(0, 3, (b,), generator=gen)
    # The engines keep a slot's entries with gaps, and SGLang and vLLM have the two orders of what is convolved.
    pasts = torch.full((SLOTS, taps - 1, channels + 3), torch.nan, dtype=dtype)[:, :, :channels].transpose(1, 2)
    pasts = pasts.contiguous() if seed % 4 > 1 else pasts
    states = torch.full((SLOTS, hv + 1, v, k), torch.nan, dtype=state_dtype)[:, :hv]
    known = slots[lengths > 0] if seed % 3 else slots
    pasts[known] = draw(len(known), channels, taps - 1).to(dtype)
    states[known] = draw(len(known), hv, v, k).to(state_dtype)
    n = b * width
    wide = draw(n, channels + 2 * hv + 1).to(dtype)  # rows of one projection
    nodes = Projections(*wide.split([channels, hv, hv, 1], 1)[:3])
    places = Places(slots, lengths if seed % 3 else None)
    last = torch.randint(0, width, (b,), generator=gen)
    return Case(net, nodes, Caches(pasts, states), places, tree, last)


SIZES = (
    st.integers(0, 2**31),
    st.integers(0, 3),
    st.integers(1, 20),
    st.tuples(st.integers(1, 2), st.integers(1, 3)),
    st.sampled_from([(8, 6), (16, 16), (40, 24), (4, 36)]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)


@prop
@given(*SIZES)
def test_attend_trees(
    seed: int, b: int, width: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, kept: torch.dtype
) -> None:
    case = make(seed, b, width, heads, dims, dtype, kept)
    before = [x.clone() for x in case.caches]
    room = None if seed % 2 else gated_delta_trees.room_for(case.n + 3, case.net, dtype)
    found, left = case.attend(room)
    wanted, wanted_left = case.oracle()
    check(found, wanted, dtype)
    assert torch.equal(left.inputs, wanted_left.inputs)
    for mine, right in zip(left[1:], wanted_left[1:], strict=True):
        check(mine, right, dtype)
    for name, now, then in zip(Caches._fields, case.caches, before, strict=True):
        assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0)), f"{name} was written"
    if room is not None:
        assert all(x.data_ptr() == y.data_ptr() for x, y in zip(left, room, strict=True) if y.numel() and case.n)


def test_without_room_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch what was computed is returned; the inputs are the caller's memory, which it may write again."""
    monkeypatch.setattr(gated_delta_trees, "_triton", lambda like: None)
    monkeypatch.setattr(gated_delta_trees, "room_for", None)
    case = make(1, 2, 5)
    _, left = case.attend()
    wanted = Left(*(x.clone() for x in case.oracle()[1]))
    case.nodes.mixed_qkv.fill_(torch.nan)
    assert all(torch.equal(x, y) for x, y in zip(left, wanted, strict=True))


@prop
@given(*SIZES)
def test_commit_trees(
    seed: int, b: int, width: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, kept: torch.dtype
) -> None:
    case = make(seed, b, width, heads, dims, dtype, kept)
    (past, state), (_, left) = case.before(), case.oracle()
    left = Left(*(x.contiguous() for x in left))
    wanted = Caches(*(x.clone() for x in case.caches))
    wanted.pasts[case.places.slots] = gated_delta.past_after(past, left, case.tree, case.last)
    wanted.states[case.places.slots] = gated_delta.state_after(state, left, case.tree, case.last)
    case.commit(left)
    assert torch.equal(case.caches.pasts.nan_to_num(7.0), wanted.pasts.nan_to_num(7.0))
    torch.testing.assert_close(case.caches.states, wanted.states, equal_nan=True, **NARROW[kept])


def check(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Convolved values are rounded to the dtype: one that another order of the sum rounds otherwise is felt by all."""
    torch.testing.assert_close(found, wanted, **NARROW[dtype])


@pytest.mark.parametrize(("width", "chain"), [(64, False), (64, True), (33, False)])
def test_large_heads(width: int, chain: bool) -> None:
    """Heads of published models, trees of most nodes, and a part of a prompt."""
    case = make(4, 2, width, (1, 2), (128, 128), chain=chain)
    found, left = case.attend()
    wanted, wanted_left = case.oracle()
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(left.updates, wanted_left.updates, rtol=2e-4, atol=2e-4)
    past, state = case.before()
    right = gated_delta.state_after(state, wanted_left, case.tree, case.last)
    case.commit(left)
    torch.testing.assert_close(case.caches.states[case.places.slots], right, rtol=2e-4, atol=2e-4)
    assert torch.equal(
        case.caches.pasts[case.places.slots], gated_delta.past_after(past, wanted_left, case.tree, case.last)
    )


def test_equal_keys_down_a_long_path() -> None:
    """The triangular system at its worst: each node corrects all nodes above it in full."""
    case = make(4, 1, 48, (1, 1), (16, 16), chain=True)
    case.nodes.mixed_qkv[:, :32] = case.nodes.mixed_qkv[:1, :32]
    case.nodes.a.fill_(-30.0)  # no decay
    case.nodes.b.fill_(30.0)  # beta is 1
    found, _ = case.attend()
    torch.testing.assert_close(found, case.oracle()[0], rtol=1e-3, atol=1e-3)


def test_strong_decays_stay_finite() -> None:
    case = make(4, 1, 16, (1, 1), (16, 16), chain=True)
    case.nodes.a.fill_(60.0)
    found, left = case.attend()
    torch.testing.assert_close(found, case.oracle()[0], rtol=1e-4, atol=1e-4)
    case.commit(left)
    assert case.caches.states[case.places.slots].isfinite().all()


def test_one_wrong_ancestor_changes_that_node_and_those_below() -> None:
    case = make(4, 1, 6, chain=True)
    right, _ = case.attend()
    case.tree.seen[0, 4, 2] = False
    wrong, _ = case.attend()
    assert (right != wrong)[0].flatten(1).any(dim=1).tolist() == [i >= 4 for i in range(6)]


def test_another_last_node_leaves_another_state() -> None:
    """The controls of a commit: node, slot, and what was convolved."""
    states = []
    for last in (3, 4):
        case = make(4, 2, 6, chain=True)
        case.last.fill_(last)
        case.commit(case.attend()[1])
        states.append(case.caches)
    slots = case.places.slots
    assert ((states[0].states != states[1].states)[slots]).flatten(1).any(1).all()
    assert ((states[0].pasts != states[1].pasts)[slots]).flatten(1).any(1).all()


def test_wrong_arguments() -> None:
    case = make(4, 2, 6)
    with pytest.raises(ValueError, match=r"states has shape \[9, 3, 6, 8\], wanted \[9, 4, 6, 8\]"):
        case._replace(caches=case.caches._replace(states=case.caches.states[:, :3])).attend()
    with pytest.raises(TypeError, match="slots is int32, wanted int64"):
        case._replace(places=case.places._replace(slots=case.places.slots.int())).attend()
    with pytest.raises(TypeError, match="last is int32, wanted int64"):
        case._replace(last=case.last.int()).commit(case.attend()[1])
