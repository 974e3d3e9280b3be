"""benchmarks/rescoring.py: the scores are those of reading every path alone, and the trees are the best of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress
from torch import Tensor
from trained_heads import trained_head
from transformers import AutoModelForCausalLM

from benchmarks.rescoring import FEATURES, Context, compare, measure, rescore, select
from eagle_plugin.common.errors import UserError
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.learning.reference.decode import load_head
from eagle_plugin.learning.reference.draft import draft_trees, prefill_head
from eagle_plugin.learning.reference.rules import RULES
from eagle_plugin.learning.reference.target import target_features

TEXT = [3 + 7 * i % 400 for i in range(12)]
SHAPE, CANDIDATES = Shape(4, 3, 6), 16
Pair = tuple[Any, DraftHead]


@pytest.fixture(scope="module")
def tiny(tiny_target: Path) -> Pair:
    """A random head of two layers, whose scores so depend on all that its rows read."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    return model, trained_head("peagle", tiny_target, layers=2, mask_token_id=2, aux_layers=(1, 4, 6))


@torch.no_grad()
def context_of(pair: Pair, roots: list[int]) -> tuple[Context, DraftTree]:
    model, head = pair
    context = Context(TEXT, prefill_head(head, TEXT, target_features(model, head, TEXT)), torch.tensor(roots))
    params = SamplingParams.of(len(roots), 0.0)
    wide = SHAPE._replace(width=CANDIDATES)
    drafted = draft_trees(
        head, TEXT, context.prefill, context.roots, RULES["target_only"], params, torch.Generator(), wide
    )
    return context, drafted[0]


@torch.no_grad()
def score_alone(pair: Pair, root: int, path: list[int], features: str) -> Tensor:
    """log p of a path of drafts after TEXT[root]: the text, masked rows or the path as one plain sequence."""
    model, head = pair
    tokens, n = TEXT[: root + 1], root
    real = head.fuse(target_features(model, head, tokens)[:n])

    def states(more: list[int], hidden: Tensor) -> Tensor:
        ids, rows = torch.tensor([*tokens[1:], *more]), n + len(more)
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()
        return head(head.embed(ids), torch.cat([real, hidden]), torch.arange(rows), causal)[0][n - 1 :]

    assert head.mask_token_id is not None
    masks = head.mask_state().expand(SHAPE.steps - 1, -1)
    drafted_from = states([head.mask_token_id] * len(masks), masks)[: len(path)]
    hidden = drafted_from if features == "state" else head.mask_state().expand(len(path), -1)
    logp = head.logits(states(path, hidden)[: len(path)]).log_softmax(-1)
    ids = head.to_target(torch.arange(len(head.d2t))).tolist()
    return sum((logp[i, ids.index(token)] for i, token in enumerate(path)), torch.zeros(()))


@pytest.mark.parametrize("features", FEATURES)
def test_scores_are_those_of_paths_read_alone(features: str, tiny: Pair) -> None:
    roots = [5, 9]
    context, trees = context_of(tiny, roots)
    with torch.no_grad():
        scores = rescore(tiny[1], context, trees, SHAPE.steps, features)
    assert int(trees.depths.max()) >= 3
    for i, root in enumerate(roots):
        paths: list[list[int]] = [[]]
        for node in range(1, CANDIDATES):
            paths.append([*paths[int(trees.parents[i, node])], int(trees.tokens[i, node])])
            alone = score_alone(tiny, root, paths[node], features)
            torch.testing.assert_close(scores[i, node], alone, rtol=1e-4, atol=1e-4)  # other sums, by CPU and matrix
            parent = scores[i, int(trees.parents[i, node])]
            assert scores[i, node] <= parent
        other = score_alone(tiny, root, [*paths[-1][:-1], paths[1][0] + 1], features)  # the control: another path
        assert not torch.isclose(other, scores[i, -1], rtol=1e-3, atol=1e-3)


def test_the_best_candidates_are_selected_with_their_parents(tiny: Pair) -> None:
    context, trees = context_of(tiny, [5, 9])
    assert all(torch.equal(*pair) for pair in zip(select(trees, -trees.depths.float(), CANDIDATES), trees, strict=True))
    with torch.no_grad():
        scores = rescore(tiny[1], context, trees, SHAPE.steps, "state")
    chosen = select(trees, scores, SHAPE.width)
    for i in range(2):
        best = scores[i, 1:].topk(SHAPE.width - 1).indices + 1
        assert sorted(chosen.tokens[i, 1:].tolist()) == sorted(trees.tokens[i, best].tolist())


def test_a_head_that_knows_its_target_gains_nothing(markov_target: Path, markov_peagle: Path, tiny: Pair) -> None:
    """Four levels are right; of other places and fewer nodes no tree can be better than all candidates."""
    model = AutoModelForCausalLM.from_pretrained(markov_target, dtype=torch.float32)
    head = load_head(model, markov_target, markov_peagle, algorithm="EAGLE3")
    options = argparse.Namespace(shape=SHAPE, candidates=CANDIDATES, tokens=12, head=markov_peagle)
    with torch.no_grad(), Progress(disable=True) as bar:
        rows = measure(model, head, [[40, 41, 99], [5, 7]], options, -1, bar)
        lengths = {row["tree"]: row["accept_length"] for row in rows}
        assert lengths["marginals"] == lengths["all candidates"] == SHAPE.steps + 1
        assert rows[0]["contexts"] == 2 * (12 - SHAPE.steps - 1) and rows[0]["gain"] == 0
        found = compare(tiny[1], context_of(tiny, [5, 6])[0], SHAPE, CANDIDATES)
    assert all((lengths <= found["all candidates"]).all() for lengths in found.values())


def test_another_kind_of_head_is_refused(markov_target: Path, markov_eagle3: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(markov_target, dtype=torch.float32)
    head = load_head(model, markov_target, markov_eagle3, algorithm="EAGLE3")
    options = argparse.Namespace(shape=SHAPE, candidates=CANDIDATES, tokens=12, head="there")
    with pytest.raises(UserError, match="--head there is a head of kind eagle3, wanted a P-EAGLE head"):
        measure(model, head, [], options, -1, Progress(disable=True))
