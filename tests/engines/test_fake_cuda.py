"""The round that both engines share, on fake CUDA tensors: every tensor on the device, no value read by the host."""

from __future__ import annotations

import pytest
import torch
from fake_cuda import CUDA, FakeLibrary, require_cuda
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.runtime import rng
from eagle_plugin.runtime.accept import KVCaches, accept, accepted_rows
from eagle_plugin.runtime.lookups import Lookup, Lookups
from eagle_plugin.runtime.parallel_levels import HeadLevels, MaskRow
from eagle_plugin.runtime.request_limits import LimitMaker
from eagle_plugin.runtime.request_sources import NONE, Sources
from eagle_plugin.runtime.round import Drafts, HeadState, LevelRows, RecurrentLevels, TopM, draft, top_m_of

B, VOCABULARY, DRAFT_VOCABULARY, HIDDEN = 3, 512, 256, 64
SHAPE = Shape(3, 4, 16)


def sampling() -> SamplingParams:
    return SamplingParams.greedy(B, CUDA)


def lengths() -> Tensor:
    return torch.full((B,), 9, device=CUDA)


def forward(rows: LevelRows) -> tuple[Tensor, Tensor]:
    """A head that reads every tensor of its rows."""
    for name in ("tokens", "positions", "hidden", "ancestors"):
        require_cuda(name, getattr(rows, name))
    n = B * rows.nodes
    return torch.zeros(n, DRAFT_VOCABULARY, device=CUDA), torch.zeros(n, HIDDEN, device=CUDA)


def drafted(sampled: bool = True, mapped: bool = True, lookup: Lookup | None = None) -> Drafts:
    top_m = top_m_of(SHAPE, not sampled)
    top = TopM(torch.zeros(B, top_m, device=CUDA), torch.zeros(B, top_m, dtype=torch.int64, device=CUDA))
    levels = RecurrentLevels(SHAPE, HeadState(top, torch.zeros(B, HIDDEN, device=CUDA)), lengths(), top_m, forward)
    return draft(
        SHAPE,
        torch.zeros(B, dtype=torch.int64, device=CUDA),
        levels,
        sampling(),
        lengths() if sampled else None,
        lengths(),
        torch.zeros(DRAFT_VOCABULARY, dtype=torch.int64, device=CUDA) if mapped else None,
        lookup=lookup,
    )


@pytest.mark.parametrize("sampled", [False, True])
def test_limits_of_requests(library: FakeLibrary, sampled: bool) -> None:
    """No drafts, looked-up ones alone, and those of the head alone."""
    lookups, rows = Lookups(2 + B, SHAPE, 64, VOCABULARY, CUDA), torch.arange(1, 1 + B, device=CUDA)
    asked = [NONE, Sources(head=False), Sources(lookup=False)]
    lookups.begin(rows, [[1, 2, 3, 1, 2]] * B, asked)
    drafts = drafted(sampled, lookup=lookups.of(rows))
    limits = LimitMaker(CUDA).of(asked)
    assert limits is not None
    limits.apply(drafts.tree, lookups, rows)
    for name, values in drafts.tree._asdict().items():
        require_cuda(name, values)
        assert values.shape == (B, SHAPE.width)


@pytest.mark.parametrize("sampled", [False, True])
def test_draft_with_all_levels_at_once(library: FakeLibrary, sampled: bool) -> None:
    """One look at the head for all levels after the first, and one launch for the candidates of all levels."""
    top_m = top_m_of(SHAPE, not sampled)
    top = TopM(torch.zeros(B, top_m, device=CUDA), torch.zeros(B, top_m, dtype=torch.int64, device=CUDA))
    state = HeadState(top, torch.zeros(B, HIDDEN, device=CUDA))
    mask = MaskRow(7, torch.zeros(1, HIDDEN, device=CUDA))
    drafts = draft(
        SHAPE,
        torch.zeros(B, dtype=torch.int64, device=CUDA),
        HeadLevels(mask).source(SHAPE, state, lengths(), top_m, forward),
        sampling(),
        lengths() if sampled else None,
        lengths(),
        None,
    )
    assert on_cuda(drafts.tree)
    children = ["propose", "grow_levels"] if sampled else ["grow_levels"]
    assert library.launched == ["topk_log_softmax", *children, "select_tree"]


def on_cuda(values: DraftTree | Accepted) -> bool:
    return all(tensor.device.type == "cuda" for tensor in values)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_draft(library: FakeLibrary, sampled: bool, mapped: bool) -> None:
    drafts = drafted(sampled, mapped)
    assert on_cuda(drafts.tree)
    assert drafts.tree.tokens.shape == (B, SHAPE.width)
    # One look at the head per level after the first; every level is proposed, grown, and at last selected from.
    per_level = ["propose", "grow_level"] if sampled else ["grow_level"]
    level = ["topk_log_softmax", *per_level]
    assert library.launched == [*per_level, *level, *level, "select_tree"]


def test_accept(library: FakeLibrary) -> None:
    drafts = drafted()
    logits = torch.zeros(B * SHAPE.width, VOCABULARY, device=CUDA)
    accepted = accept(drafts, logits, sampling(), lengths(), lengths(), "joint")
    assert on_cuda(accepted)
    assert accepted.tokens.shape == (B, SHAPE.max_accept_length)
    require_cuda("rows", accepted_rows(accepted, SHAPE.width))
    pointers = torch.zeros(4, dtype=torch.int64, device=CUDA)
    window = torch.zeros(B, SHAPE.width, dtype=torch.int64, device=CUDA)
    KVCaches(pointers, pointers, 100).move_accepted(window, accepted)
    assert library.launched[-2:] == ["verify_tree", "compact_kv"]


def test_methods_of_drafts(library: FakeLibrary) -> None:
    drafts, index = drafted(), torch.zeros(2, dtype=torch.int64, device=CUDA)
    parts = [drafts.take(index), Drafts.plain(index), drafts.truncate(lengths()), drafts.resize(4), drafts.resize(20)]
    whole = Drafts.concatenate(parts)
    assert all(on_cuda(part.tree) for part in [*parts, whole])


def test_keys(library: FakeLibrary) -> None:
    table = rng.KeyTable(8, CUDA, seed=1)
    rows = torch.zeros(B, dtype=torch.int64, device=CUDA)
    table.draw(rows, {1: 7})
    require_cuda("keys", table.of(rows))


def test_the_controls_fail(library: FakeLibrary) -> None:
    """What these tests must notice: a tensor on the CPU, a value on the host, a shape that depends on values."""
    with pytest.raises(TypeError, match="uniforms, argument 1 .* is on cpu"):
        rng.synthetic_uniforms(lengths(), lengths().cpu())
    with pytest.raises(ValueError, match="uniforms, argument 0: strides"):
        rng.synthetic_uniforms(lengths().repeat(2)[::2], lengths())
    with pytest.raises(Exception, match="unhandled|two different devices|device"):
        lengths() + torch.zeros(B, dtype=torch.int64)
    with pytest.raises(DataDependentOutputException):
        lengths()[0].item()
    with pytest.raises(DynamicOutputShapeException):
        lengths()[lengths() > 3]
