"""Synthetic acceptance: paths of the drafted tree, as long as the rates say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eagle_plugin.core.rng import uniforms
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.synthetic import (
    UNIFORMS,
    Rates,
    SyntheticRates,
    accept_synthetic,
    keys_of_trees,
    rates_of_length,
    rates_of_normal,
)
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.selftest.tree_paths import random_tree

VOCABULARY = 20
SYNTHETIC = 2  # the stream of `runtime.rng`
SHAPE = Shape(3, 4, 16)
RATES = (0.79, 0.55, 0.31)
ROUNDS = 10_000


def trees(b: int, shape: Shape = SHAPE, seed: int = 0) -> DraftTree:
    """Trees of one structure that has every depth, with other tokens in each."""
    gen = torch.Generator().manual_seed(seed)
    tree = random_tree(torch.randint(0, VOCABULARY, (b,), generator=gen), shape, VOCABULARY, gen)
    assert int(tree.depths.max()) == shape.steps
    return tree


def logits_of(tree: DraftTree, seed: int = 1) -> Tensor:
    return torch.randn(tree.tokens.numel(), VOCABULARY, generator=torch.Generator().manual_seed(seed))


def tail(lengths: Tensor) -> list[float]:
    """How often one drafted token or more were accepted, two or more, and so on."""
    return [float((lengths > depth).double().mean()) for depth in range(1, SHAPE.steps + 1)]


def within_two_percent(found: list[float]) -> bool:
    return all(abs(x - rate) <= 0.02 * rate for x, rate in zip(found, RATES, strict=True))


def lengths_of(rates: Rates, tree: DraftTree, keys: Tensor) -> list[float]:
    """The tail of 10,000 rounds of each of 4 requests, which are at all positions of a text in turn."""
    drawn = uniforms(keys, torch.arange(ROUNDS).repeat(4), SYNTHETIC, UNIFORMS)
    accepted = accept_synthetic(tree, logits_of(tree), rates, drawn, SHAPE.max_accept_length)
    return tail(accepted.lengths)


@pytest.mark.parametrize("is_greedy", [False, True])
def test_ten_thousand_rounds_meet_the_rates(is_greedy: bool) -> None:
    """With keys as a server has them: one per request for all its rounds, or none where all requests are greedy."""
    tree = trees(4 * ROUNDS)
    keys = torch.randint(-(2**63), 2**63 - 1, (4,), generator=torch.Generator().manual_seed(3))
    keys = keys_of_trees(tree) if is_greedy else keys.repeat_interleave(ROUNDS)
    assert within_two_percent(lengths_of(RATES, tree, keys))
    # The control: rates that are taken for conditions, each of a level if the one before it was accepted.
    conditional = RATES[0], RATES[0] * RATES[1], RATES[0] * RATES[1] * RATES[2]
    assert not within_two_percent(lengths_of(conditional, tree, keys))


@pytest.mark.parametrize("shape", [Shape(3, 4, 16), Shape(2, 4, 8), Shape.chain(5), Shape(6, 4, 64)])
def test_what_is_accepted_is_a_path_of_the_tree(shape: Shape) -> None:
    tree = trees(64, shape)
    logits = logits_of(tree)
    drawn = torch.rand(64, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    rates = tuple(0.9**depth for depth in range(1, shape.steps + 1))
    accepted = accept_synthetic(tree, logits, rates, drawn, shape.max_accept_length)
    choices = logits.view(64, shape.width, -1).argmax(-1)
    ends: set[int] = set()
    for i in range(64):
        nodes, length = accepted.index[i].tolist(), int(accepted.lengths[i])
        assert length == 1 + sum(float(drawn[i, 0]) < rate for rate in rates)
        assert nodes[0] == 0 and nodes[length:] == [-1] * (shape.max_accept_length - length)
        assert [int(tree.parents[i, node]) for node in nodes[1:length]] == nodes[: length - 1]
        wanted = [*(int(tree.tokens[i, node]) for node in nodes[1:length]), int(choices[i, nodes[length - 1]])]
        assert accepted.tokens[i].tolist() == wanted + [0] * (shape.max_accept_length - length)
        ends.add(nodes[length - 1])
    if shape.topk > 1:
        assert len(ends) > shape.steps + 2  # other nodes of one depth, so that keys and values move


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_tree_that_is_less_deep_gives_its_deepest_path(size: int) -> None:
    """Padding is never accepted, whatever is drawn."""
    b = 32
    tree = trees(b).truncate(torch.full((b,), size))
    deepest = int(tree.depths.max())
    drawn = torch.rand(b, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    accepted = accept_synthetic(tree, logits_of(tree), (1.0, 1.0, 1.0), drawn, SHAPE.max_accept_length)
    assert accepted.lengths.tolist() == [deepest + 1] * b
    assert int(accepted.index.max()) < size


@pytest.mark.parametrize("length", [0.5, 1.0, 1.25, 2.6, 3.0, 4.0, 9.0])
def test_rates_of_a_mean_length(length: float) -> None:
    rates = rates_of_length(length, 3)
    assert 1 + sum(rates) == pytest.approx(min(max(length, 1.0), 4.0))
    assert sum(0 < rate < 1 for rate in rates) <= 1  # the whole number below it, or one more


def test_rates_of_a_normal_length() -> None:
    """Against lengths that are drawn as SGLang draws them."""
    drawn = torch.normal(2.4, 1.0, (200_000,), generator=torch.Generator().manual_seed(6)).clamp(1, 4).round()
    for depth, rate in enumerate(rates_of_normal(2.4, 3), 1):
        assert float((drawn > depth).double().mean()) == pytest.approx(rate, abs=0.005)


def test_rates_of_a_shape_are_those_of_the_largest_that_it_contains() -> None:
    rates = SyntheticRates(((Shape(3, 4, 16), (0.9, 0.8, 0.7)), (Shape(1, 4, 5), (0.6,)), (Shape(3, 1, 4), (0.5,) * 3)))
    wanted: list[tuple[Shape, tuple[float, ...]]] = [
        (Shape(3, 4, 16), (0.9, 0.8, 0.7)),
        (Shape(3, 4, 64), (0.9, 0.8, 0.7)),
        (Shape(2, 4, 8), (0.6,)),
        (Shape(3, 4, 15), (0.6,)),
        (Shape(3, 1, 6), (0.5,) * 3),
        (Shape(2, 2, 4), ()),
    ]
    assert [(shape, rates.of(shape)) for shape, _ in wanted] == wanted
    assert SyntheticRates((), (0.5,)).of(Shape(2, 2, 4)) == (0.5,)


@pytest.mark.parametrize("keys", [keys_of_trees, lambda tree: tree.tokens[:, 0].contiguous()])
def test_greedy_requests_with_equal_drafts_draw_other_lengths(keys: Callable[[DraftTree], Tensor]) -> None:
    """Of several lanes; the control takes the root's token alone."""
    tree = trees(1).take(torch.zeros(8, dtype=torch.int64))
    drawn = uniforms(keys(tree), torch.full((8,), 17), SYNTHETIC, UNIFORMS)
    different = len(drawn.unique(dim=0)) == 8
    assert different == (keys is keys_of_trees)
