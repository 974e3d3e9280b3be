"""The reference decoder with P-EAGLE heads: trees of what one pass over masked rows says of each level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draft_paths import best_paths
from reference_decoder import draft_tree, plain_greedy, served_head, speculative_greedy
from safetensors.torch import load_file, save_file
from torch import Tensor
from trained_heads import rewrite, trained_head
from transformers import AutoModelForCausalLM

from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.export import save_head
from eagle_plugin.learning.reference.target import target_features

PROMPT = [0, 40, 41, 99, 120, 77, 5]
LEVELS = 4  # that the Markov head drafts right
SHAPES = [Shape.chain(1), Shape.chain(5), Shape(2, 4, 8), Shape(6, 2, 12), Shape(3, 8, 64), Shape(16, 4, 48)]


@pytest.fixture(scope="module")
def tiny_peagle(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head of two layers with its own aux layers, which knows nothing."""
    folder = tmp_path_factory.mktemp("heads") / "tiny-peagle"
    head = trained_head("peagle", tiny_target, layers=2, mask_token_id=2, aux_layers=(1, 4, 6))
    save_head(head, folder, target_dir=tiny_target, dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def cases(
    tiny_target: Path, markov_target: Path, tiny_peagle: Path, markov_peagle: Path
) -> dict[str, tuple[Any, DraftHead]]:
    pairs = {"tiny": (tiny_target, tiny_peagle), "markov": (markov_target, markov_peagle)}
    found = {}
    for name, (target, folder) in pairs.items():
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        found[name] = model, served_head(target, folder)
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["tiny", "markov"])
def test_equals_plain_greedy(name: str, shape: Shape, cases: dict[str, tuple[Any, DraftHead]]) -> None:
    model, head = cases[name]
    assert head.kind == "peagle"
    found = speculative_greedy(model, head, PROMPT, 13, shape)
    assert found.tokens == plain_greedy(model, PROMPT, 13)
    if name == "markov":
        depth = min(shape.steps, shape.width - 1, LEVELS)
        assert found.accept_lengths == [depth + 1] * len(found.accept_lengths)


@torch.no_grad()
def level_logits(model: Any, head: DraftHead, tokens: list[int], level: int) -> Tensor:
    """The head's logits of a level, by target ids: the text and level - 1 masks as one plain sequence."""
    n, masks = len(tokens) - 1, level - 1
    assert head.mask_token_id is not None
    ids = torch.tensor([*tokens[1:], *[head.mask_token_id] * masks])
    hidden = torch.cat([head.fuse(target_features(model, head, tokens[:-1])), head.mask_state().expand(masks, -1)])
    causal = torch.ones(n + masks, n + masks, dtype=torch.bool).tril()
    state, _ = head(head.embed(ids), hidden, torch.arange(n + masks), causal)
    logits = torch.full((len(head.embedding),), -torch.inf)
    logits[head.to_target(torch.arange(len(head.d2t)))] = head.logits(state[-1])
    return logits


@torch.no_grad()
def test_the_tree_is_the_best_paths_of_the_levels(cases: dict[str, tuple[Any, DraftHead]]) -> None:
    shape = Shape(4, 3, 20)
    model, head = cases["tiny"]  # the Markov head gives equal logits to all tokens but one
    tokens = [*PROMPT, *plain_greedy(model, PROMPT, 3)]
    tree = draft_tree(model, head, tokens, SamplingParams.greedy(1), torch.zeros(1, dtype=torch.int64), shape)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[0, 1:].tolist(), tree.parents[0, 1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    logits = [level_logits(model, head, tokens, level) for level in range(1, shape.steps + 1)]
    assert set(paths[1:]) == best_paths(shape, lambda path: logits[len(path)])
    assert max(map(len, paths)) >= 3


def test_a_head_with_another_mask_is_right_at_the_first_level_only(
    markov_target: Path, markov_peagle: Path, tmp_path: Path
) -> None:
    """The control: what the deeper levels know comes from the mask's features and token."""
    model = AutoModelForCausalLM.from_pretrained(markov_target, dtype=torch.float32)
    folders = {
        "features": rewrite(
            markov_peagle, tmp_path / "features", weights=lambda w: w | {"mask_hidden": torch.zeros(1, 3 * 320)}
        ),
        "token": rewrite(markov_peagle, tmp_path / "token", lambda c: c | {"mask_token_id": 40, "ptd_token_id": 40}),
    }
    for name, folder in folders.items():
        head = served_head(markov_target, folder)
        found = speculative_greedy(model, head, PROMPT, 13, Shape.chain(LEVELS))
        assert found.tokens == plain_greedy(model, PROMPT, 13)
        assert max(found.accept_lengths) == 2, name


def test_without_the_mask_the_checkpoint_is_that_of_an_eagle3_head(
    markov_target: Path, markov_peagle: Path, tmp_path: Path
) -> None:
    """Its levels after the first are then drafted one after the other, which it was not made for."""
    folder = rewrite(markov_peagle, tmp_path / "head", lambda c: c | {"mask_token_id": None, "ptd_token_id": None})
    weights = load_file(folder / "model.safetensors")
    del weights["mask_hidden"]
    save_file(weights, folder / "model.safetensors")
    head = served_head(markov_target, folder)
    assert head.kind == "eagle3"
