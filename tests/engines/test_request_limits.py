"""The trees of requests that ask for other drafts than the rest of their batch, and of that rest."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from draft_paths import Path, best_paths, paths_of
from torch import Tensor

from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.kernels.tree import topk_log_softmax
from eagle_plugin.runtime.accept import accept
from eagle_plugin.runtime.lookups import Lookups
from eagle_plugin.runtime.request_limits import LimitMaker, Limits, served_sources
from eagle_plugin.runtime.request_sources import ALL, NONE, Sources
from eagle_plugin.runtime.round import Drafts, HeadState, LevelRows, RecurrentLevels, TopM, draft, top_m_of

VOCABULARY = 11
SHAPES = [Shape(1, 4, 5), Shape(2, 4, 8), Shape(3, 2, 6), Shape(4, 3, 16), Shape.chain(3)]
HEAD, LOOKUP = Sources(lookup=False), Sources(head=False)
REPEATED = [1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 10]
TEXT = [*REPEATED, *REPEATED[:-1]]  # after it comes the root
ROOT, FOUND = REPEATED[-1], tuple(REPEATED[:4])
FRESH = [i // 2 % 10 for i in range(len(TEXT))]  # the root is not in it
B = 6
ASKED = [ALL, NONE, HEAD, LOOKUP, LOOKUP, ALL]
SEQUENCES = [TEXT, TEXT, TEXT, TEXT, FRESH, TEXT]


def logits_of(i: int, path: Path) -> Tensor:
    """The head's logits [V], of one distribution for all nodes of a depth, so that both kinds of heads can have it."""
    return 2 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(100 * i + len(path)))


def drafted(shape: Shape, asked: list[Sources], temperature: float, at_once: bool) -> tuple[Drafts, Lookups]:
    """Trees of a batch with the limits that its requests ask for; at_once: by a head that lists all levels."""
    lookups = Lookups(1 + B, shape, 64, VOCABULARY, "cpu")
    rows, lengths = 1 + torch.arange(B), torch.full((B,), len(TEXT))
    lookups.begin(rows, SEQUENCES, asked)
    top_m = top_m_of(shape, temperature == 0)

    def lists(depth: int, per_request: int) -> TopM:
        logits = torch.stack([logits_of(i, (0,) * depth) for i in range(B)]).repeat_interleave(per_request, dim=0)
        return TopM(*topk_log_softmax(logits, min(top_m, VOCABULARY)))

    def forward(level: LevelRows) -> tuple[Tensor, Tensor]:
        depth = int(level.positions[0]) - len(TEXT) + 1
        logits = torch.stack([logits_of(i, (0,) * depth) for i in range(B)])
        return logits.repeat_interleave(level.nodes, dim=0), torch.zeros(B * level.nodes, 1)

    levels: TopM | RecurrentLevels = RecurrentLevels(
        shape, HeadState(lists(0, 1), torch.zeros(B, 1)), lengths, top_m, forward
    )
    if at_once:
        of_depths = [lists(depth, 1) for depth in range(shape.steps)]
        levels = TopM(*(torch.stack(values, dim=1) for values in zip(*of_depths, strict=True)))
    keys = torch.arange(B) + 5 if temperature else None
    params, roots = SamplingParams.of(B, temperature), torch.full((B,), ROOT)
    drafts = draft(shape, roots, levels, params, keys, lengths, None, lookup=lookups.of(rows))
    limits = LimitMaker("cpu").of(asked)
    if limits is not None:
        limits.apply(drafts.tree, lookups, rows)
    return drafts, lookups


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_request_gets_what_it_asks_for(shape: Shape, at_once: bool, temperature: float) -> None:
    drafts, _ = drafted(shape, ASKED, temperature, at_once)
    free, _ = drafted(shape, [ALL] * B, temperature, at_once)
    looked_up = {FOUND[: depth + 1] for depth in range(shape.steps)}
    assert paths_of(drafts, 1) == [] and paths_of(drafts, 4) == []
    assert set(paths_of(drafts, 3)) == looked_up
    for i in (0, 5):
        assert all(torch.equal(x[i], y[i]) for x, y in zip(drafts.tree, free.tree, strict=True))
    assert paths_of(free, 1) and set(paths_of(free, 3)) != looked_up, "the control: limits change nothing"
    if not temperature:
        assert set(paths_of(drafts, 2)) == best_paths(shape, partial(logits_of, 2))
    if shape.width == 16:
        assert FOUND[:1] in paths_of(free, 2) and FOUND[:1] not in paths_of(drafts, 2), "the control"
    # Padding is what padding is everywhere: it has the root's token, and sees the root and itself.
    for i in (1, 3, 4):
        gone = drafts.tree.parents[i] < 0
        nodes = torch.arange(shape.width)
        assert drafts.tree.tokens[i][gone].unique().tolist() == [ROOT] and not drafts.tree.depths[i][gone].any()
        assert torch.equal(drafts.tree.ancestors[i][gone], (1 << nodes | 1)[gone])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_who_has_no_drafts_accepts_none(temperature: float) -> None:
    """Whatever the target says: also where it says what the head does."""
    shape = Shape(2, 4, 8)
    lengths, keys = torch.full((B,), len(TEXT)), torch.arange(B) + 5
    params, most = SamplingParams.of(B, temperature), torch.zeros(B, dtype=torch.int64)
    for seed in range(60):
        logits = 3 * torch.randn(B * shape.width, VOCABULARY, generator=torch.Generator().manual_seed(seed))
        drafts, free = (drafted(shape, asked, temperature, False)[0] for asked in (ASKED, [ALL] * B))
        found, wanted = (accept(one, logits, params, keys, lengths, "joint") for one in (drafts, free))
        assert found.lengths[1] == found.lengths[4] == 1
        # What the token after the root is does not depend on the tree.
        assert torch.equal(found.tokens[:, 0], wanted.tokens[:, 0])
        most = torch.maximum(most, torch.stack([found.lengths, wanted.lengths]).amax(0).long())
    assert (most[[0, 2, 5]] > 1).all() and most[1] > 1, "the control: with drafts some are accepted"


def test_limits_of_batches() -> None:
    maker = LimitMaker("cpu")
    assert maker.of([ALL, HEAD, ALL]) is None and maker.of([]) is None
    first = maker.of(ASKED)
    assert first is not None and first.drafting == [0, 2, 3, 4, 5]
    assert first.without.tolist() == [1] and first.looked_up.tolist() == [3, 4]
    assert maker.of(list(ASKED)) is first, "the same is made again for each round"
    other = maker.of([NONE, NONE])
    assert other is not None and other.drafting == [] and other.without.tolist() == [0, 1]


def test_sources_that_a_server_does_not_have() -> None:
    for asked in (ALL, NONE, HEAD, LOOKUP):
        assert served_sources(asked, has_lookups=True) == asked
    assert served_sources(LOOKUP, has_lookups=False) == NONE and served_sources(ALL, has_lookups=False) == HEAD


def test_a_row_forgets_what_its_last_request_asked_for() -> None:
    lookups = Lookups(3, Shape(2, 2, 4), 64, VOCABULARY, "cpu")
    rows = torch.tensor([2, 1])
    lookups.begin(rows, [TEXT, TEXT], [LOOKUP, HEAD])
    assert lookups.of(rows).rows.tolist() == [2, 0] and lookups.of(rows).alone.tolist() == [True, False]
    lookups.begin(rows, [TEXT, TEXT])
    assert lookups.of(rows).rows.tolist() == [2, 1] and not lookups.of(rows).alone.any()


def test_trees_of_a_captured_round_keep_their_memory() -> None:
    drafts, _ = drafted(Shape(2, 4, 8), [ALL] * B, 0.0, False)
    where = [values.data_ptr() for values in drafts.tree]
    limits = Limits([], torch.arange(B), torch.zeros(0, dtype=torch.int64))
    limits.apply(drafts.tree, None, None)
    assert [values.data_ptr() for values in drafts.tree] == where and (drafts.tree.parents < 0).all()
