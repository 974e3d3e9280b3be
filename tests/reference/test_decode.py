"""The reference decoder: equal to plain decoding for every head and tree, and every right draft is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from covering import half
from reference_decoder import draft_tree, plain_greedy, served_head, speculative_greedy
from torch import Tensor
from transformers import AutoModelForCausalLM

from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.verify import Accepted, verify_greedy
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.learning.reference.target import target_features

PROMPT = [0, 40, 41, 99, 120, 77, 5]
SHAPES = {  # steps, topk, width
    "chain 1": (1, 1, 2),
    "chain 5": (5, 1, 6),
    "engine default": (2, 4, 8),
    "deep": (6, 2, 12),
    "wide": (3, 8, 64),
    "padded": (2, 2, 16),  # 6 candidates for 15 places
    "pruned": (4, 4, 3),
}
HEADS = {
    "tiny_eagle2": "EAGLE",
    "tiny_eagle3": "EAGLE3",
    "tiny_eagle3_reduced": "EAGLE3",
    "markov_eagle2": "EAGLE",
    "markov_eagle3": "EAGLE3",
    "markov_eagle3_reduced": "EAGLE3",
}


@pytest.fixture(scope="module")
def targets(tiny_target: Path, markov_target: Path) -> dict[str, tuple[Path, Any]]:
    paths = {"tiny": tiny_target, "markov": markov_target}
    return {k: (p, AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32)) for k, p in paths.items()}


@pytest.mark.parametrize(("name", "shape"), half(tuple(HEADS), tuple(SHAPES)))
def test_equals_plain_greedy(
    name: str, shape: str, request: pytest.FixtureRequest, targets: dict[str, tuple[Path, Any]]
) -> None:
    steps, topk, width = SHAPES[shape]
    path, model = targets[name.split("_")[0]]
    head = served_head(path, request.getfixturevalue(name), HEADS[name])
    out = speculative_greedy(model, head, PROMPT, 13, Shape(steps, topk, width))
    assert out.tokens == plain_greedy(model, PROMPT, 13)
    if name.startswith("markov"):
        depth = min(steps, width - 1)
        assert out.accept_lengths == [depth + 1] * len(out.accept_lengths)
    assert sum(out.accept_lengths) >= 12 > sum(out.accept_lengths[:-1])  # the first token is the prefill's


def children(head: DraftHead, hidden: Tensor, tokens: list[int], path: tuple[int, ...], k: int) -> list[tuple]:
    """(log p, token) of the best k children of a path, by running the head on the path as a plain sequence."""
    L = len(tokens) - 1
    state, past = head(
        head.embed(torch.tensor(tokens[1:])), hidden, torch.arange(L), torch.ones(L, L, dtype=torch.bool).tril()
    )
    for i, token in enumerate(path):
        visible, position = torch.ones(1, L + i + 1, dtype=torch.bool), torch.tensor([L + i])
        state, past = head(head.embed(torch.tensor([token])), state[-1:], position, visible, past)
    logp, ids = head.logits(state[-1]).log_softmax(-1).topk(k)
    return list(zip(logp.tolist(), head.to_target(ids).tolist(), strict=True))


@pytest.mark.parametrize("name", ["tiny_eagle2", "tiny_eagle3", "tiny_eagle3_reduced"])
@torch.no_grad()
def test_tree_is_made_of_chains(
    name: str, request: pytest.FixtureRequest, targets: dict[str, tuple[Path, Any]]
) -> None:
    """The drafted tree is the EAGLE-2 tree in which every node was drafted from its own path alone."""
    steps, topk, width = 4, 3, 20
    path, model = targets["tiny"]
    head = served_head(path, request.getfixturevalue(name), HEADS[name])
    for tokens in (PROMPT, [0, 9, 8, 7, 200]):
        hidden = head.fuse(target_features(model, head, tokens[:-1]))
        frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        candidates: list[tuple[float, tuple[int, ...]]] = []
        for _ in range(steps):
            level = [
                (score + logp, (*node, token))
                for score, node in frontier
                for logp, token in children(head, hidden, tokens, node, topk)
            ]
            candidates += level
            frontier = sorted(level, reverse=True)[:topk]
        expected = {node for _, node in sorted(candidates, reverse=True)[: width - 1]}

        shape, key = Shape(steps, topk, width), torch.zeros(1, dtype=torch.int64)
        tree = draft_tree(model, head, tokens, SamplingParams.greedy(1), key, shape)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens[0, 1:].tolist(), tree.parents[0, 1:].tolist(), strict=True):
            paths.append((*paths[parent], token))
        assert set(paths[1:]) == expected
        assert max(map(len, expected)) >= 3


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_head_that_is_sometimes_wrong(algorithm: str, tmp_path: Path, targets: dict[str, tuple[Path, Any]]) -> None:
    """After some tokens the right child is the second best: a chain stops there, a tree continues."""
    path, model = targets["markov"]
    write = tiny_models.markov_eagle2_head if algorithm == "EAGLE" else tiny_models.markov_eagle3_head
    head = served_head(path, write(tmp_path, path, wrong=0.3), algorithm)
    plain = plain_greedy(model, PROMPT, 60)
    chain = speculative_greedy(model, head, PROMPT, 60, Shape.chain(3))
    tree = speculative_greedy(model, head, PROMPT, 60, Shape(3, 2, 15))
    assert chain.tokens == plain == tree.tokens
    assert set(chain.accept_lengths) == {1, 2, 3, 4}
    # Both children of the root and all four of theirs are in the tree, so only the third level can miss.
    assert set(tree.accept_lengths) == {3, 4}


def test_wrong_verification_is_caught(targets: dict[str, tuple[Path, Any]], tiny_eagle3: Path) -> None:
    """Negative control: a verifier that takes the root's first child, right or wrong, changes the text."""

    def first_child(tokens: Tensor, parents: Tensor, choices: Tensor, max_accept_length: int) -> Accepted:
        choices = choices.clone()
        choices[:, 0] = tokens[:, 1]
        return verify_greedy(tokens, parents, choices, max_accept_length)

    path, model = targets["tiny"]
    head = served_head(path, tiny_eagle3)
    out = speculative_greedy(model, head, PROMPT, 24, Shape(2, 2, 4), verify=first_child)
    assert out.tokens != plain_greedy(model, PROMPT, 24)


def test_targets_text_does_not_repeat_itself(targets: dict[str, tuple[Path, Any]]) -> None:
    """An equality test on a text that repeats itself would show little."""
    tiny, markov = (plain_greedy(targets[k][1], PROMPT, 48) for k in ("tiny", "markov"))
    assert len(set(tiny)) > 12 and len(set(markov)) == 48
    other = plain_greedy(targets["tiny"][1], [0, 9, 8, 7], 48)
    assert other[-16:] != tiny[-16:]


@torch.no_grad()
def test_features_are_the_inputs_of_the_aux_layers(
    targets: dict[str, tuple[Path, Any]], tiny_eagle3_reduced: Path, tiny_eagle2: Path
) -> None:
    path, model = targets["tiny"]
    seen: dict[int, Tensor] = {}

    def watch(i: int) -> Any:
        return lambda module, args, kwargs: seen.update({i: (args[0] if args else kwargs["hidden_states"])[0]})

    hooks = [layer.register_forward_pre_hook(watch(i), with_kwargs=True) for i, layer in enumerate(model.model.layers)]
    features = target_features(model, served_head(path, tiny_eagle3_reduced), PROMPT)
    for hook in hooks:
        hook.remove()
    assert torch.equal(features, torch.cat([seen[1], seen[4], seen[6]], -1))

    features = target_features(model, served_head(path, tiny_eagle2, "EAGLE"), PROMPT)
    assert torch.equal(model.lm_head(features), model(torch.tensor([PROMPT])).logits[0])  # after the final norm
