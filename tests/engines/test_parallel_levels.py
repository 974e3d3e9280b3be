"""Trees of a head that drafts all levels in one forward: over masked rows, or over a block with a Markov head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draft_paths import Path, best_paths, paths_of
from torch import Tensor

from eagle_plugin.core.gumbel import gumbel_noise
from eagle_plugin.core.propose import SHARPNESS
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.kernels.tree import topk_log_softmax
from eagle_plugin.runtime.parallel_levels import Block, HeadLevels, MaskRow, block_state
from eagle_plugin.runtime.round import Drafts, HeadState, LevelRows, TopM, draft, top_m_of

VOCABULARY, MASK_TOKEN = 11, 37
SHAPES = [Shape(1, 4, 5), Shape(2, 4, 8), Shape(3, 3, 20), Shape(6, 2, 12), Shape(16, 4, 64), Shape.chain(8)]
LENGTHS = torch.tensor([7, 30, 2])


def logits_of(request: int, level: int) -> Tensor:
    """The head's logits [V] of a level, whatever was drafted before it."""
    gen = torch.Generator().manual_seed(hash((request, level)) % 2**31)
    return 2 * torch.randn(VOCABULARY, generator=gen)


class MaskedHead:
    """A head that checks the masked rows that it is asked for, and counts its forwards."""

    mask = MaskRow(MASK_TOKEN, torch.full((1, 5), 0.25))

    def __init__(self, shape: Shape) -> None:
        self.rows, self.forwards = shape.steps - 1, 0

    def state(self, top_m: int) -> HeadState:
        logits = torch.stack([logits_of(i, 1) for i in range(len(LENGTHS))])
        return HeadState(TopM(*topk_log_softmax(logits, min(top_m, VOCABULARY))), torch.full((3, 5), torch.nan))

    def __call__(self, rows: LevelRows) -> tuple[Tensor, Tensor]:
        self.forwards += 1
        n = self.rows
        assert rows.nodes == n and rows.first_slot == 0 and rows.tail == n
        assert rows.tokens.tolist() == [MASK_TOKEN] * (3 * n)
        assert torch.equal(rows.hidden, self.mask.hidden.expand(3 * n, 5)) and rows.hidden.is_contiguous()
        # The head's row of the root is at position L - 1; the masked ones come after it, and each sees those before.
        assert torch.equal(rows.positions.view(3, n), LENGTHS[:, None] + torch.arange(n))
        assert rows.ancestors.tolist() == [[2 ** (j + 1) - 1 for j in range(n)]] * 3
        rows.hidden.zero_()  # as layers that add in place
        return torch.stack([logits_of(i, j + 2) for i in range(3) for j in range(n)]), torch.zeros(3 * n, 5)


def draft_with(head: MaskedHead, shape: Shape, temperature: float = 0.0) -> Drafts:
    greedy = temperature == 0
    top_m = top_m_of(shape, greedy)
    levels = HeadLevels(head.mask).source(shape, head.state(top_m), LENGTHS, top_m, head)
    sampling = SamplingParams.of(3, temperature)
    keys = None if greedy else torch.arange(3) + 5
    return draft(shape, torch.arange(3), levels, sampling, keys, LENGTHS, None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_are_the_best_paths_of_the_levels_distributions(shape: Shape) -> None:
    head = MaskedHead(shape)
    drafts = draft_with(head, shape)
    for i in range(3):
        paths = paths_of(drafts, i)
        assert len(paths) == len(set(paths))
        assert set(paths) == best_paths(shape, lambda path, i=i: logits_of(i, len(path) + 1))
    assert head.forwards == (shape.steps > 1)


def test_a_level_in_the_place_of_another_is_seen() -> None:
    """The control: the trees depend on which masked row a level takes its tokens from."""
    shape = Shape(3, 3, 20)
    paths = set(paths_of(draft_with(MaskedHead(shape), shape), 0))
    assert paths != best_paths(shape, lambda path: logits_of(0, max(len(path), 1)))


@pytest.mark.parametrize("shape", [Shape(2, 3, 16), Shape(4, 2, 16)], ids=str)
def test_the_children_of_a_level_have_the_noise_of_its_position(shape: Shape) -> None:
    drafts = draft_with(MaskedHead(shape), shape, temperature=1.0)
    for i in range(3):

        def noised(path: tuple[int, ...], i: int = i) -> Tensor:
            logits = logits_of(i, len(path) + 1).double()
            noise = gumbel_noise(torch.tensor([i + 5]), LENGTHS[i : i + 1] + len(path), torch.arange(len(logits))[None])
            return (SHARPNESS * logits.log_softmax(0) + noise[0]).float()

        assert set(paths_of(drafts, i)) == best_paths(shape, noised)


def test_a_request_drafts_the_same_in_any_round() -> None:
    """The levels of a shallow round are those of a deep one."""
    deep, shallow = Shape(6, 2, 64), Shape(3, 2, 64)
    for i in range(3):
        paths = [set(paths_of(draft_with(MaskedHead(shape), shape), i)) for shape in (deep, shallow)]
        assert paths[1] == {path for path in paths[0] if len(path) <= shallow.steps}


def after_token(level: int, token: int) -> Tensor:
    """The logits [V] of a level after a token of the level before: a Markov head's bias is in them."""
    gen = torch.Generator().manual_seed(1000 + token)
    return logits_of(0, level) + 2 * torch.randn(VOCABULARY, generator=gen)


def markov_paths(shape: Shape, after: Callable[[int, int], Tensor], top_m: int) -> list[set[Path]]:
    """The trees of a block whose row states are their level and request, after the roots 3, 5 and 7."""

    def logits_after(states: Tensor, tokens: Tensor) -> Tensor:
        rows = [[after(int(state[0]), int(token)) for token in row] for state, row in zip(states, tokens, strict=True)]
        return torch.stack([torch.stack(row) for row in rows])

    levels = HeadLevels(block=Block(MASK_TOKEN, shape.steps + 2, first=0), after=logits_after)
    states = torch.arange(1.0, shape.steps + 3)[None, :, None].repeat(3, 1, 2)
    roots = torch.tensor([3, 5, 7])
    state = block_state(levels, states, roots, shape.steps, top_m, lambda states: states)
    assert state.hidden.shape == (3, shape.steps, 2) and state.top.logp.dim() == 2 and not levels.lists_all
    source = levels.source(shape, state, LENGTHS, top_m, MaskedHead(shape))
    drafts = draft(shape, roots, source, SamplingParams.of(3, 0.0), None, LENGTHS, None)
    return [set(paths_of(drafts, i)) for i in range(3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_with_a_markov_head_each_node_has_its_own_list(shape: Shape) -> None:
    """The same in torch; and with the bias of another token, the control, other trees."""
    found = markov_paths(shape, after_token, top_m_of(shape, True))
    wanted = [
        best_paths(shape, lambda path, root=root: after_token(len(path) + 1, (root, *path)[-1])) for root in (3, 5, 7)
    ]
    assert found == wanted
    assert markov_paths(shape, lambda level, _: after_token(level, 3), top_m_of(shape, True)) != wanted
