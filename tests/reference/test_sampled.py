"""Sampled drafting and verification: the target's distribution under every rule, and the expected accept length.

The Markov target's next token depends on the last one only, so every probability is known. At temperature 4 the right
token has about a fifth of the mass and 319 others share the rest: children of all ranks are accepted and refused.
All draws have fixed seeds: a test passes always or never. ALARM is the chance that another seed would fail it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import peagle_models
import pytest
import scipy.stats
import tiny_models
import torch
from broken_verifier import whole_p_after_rejection
from torch import Tensor
from transformers import AutoModelForCausalLM

from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.verify import Accepted
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.learning.evaluate.acceptance import expected_accept_length
from eagle_plugin.learning.reference.decode import load_head, plain_greedy, speculative_sample
from eagle_plugin.learning.reference.draft import draft_tree, draft_trees, prefill_head
from eagle_plugin.learning.reference.rules import RULES, Rule, gumbel
from eagle_plugin.learning.reference.target import path_logits, target_features, tree_logits

PROMPT = [0, 40, 41, 99, 120, 77, 5]
TEMPERATURE, TREES = 4.0, 2500
STEPS, TOPK, WIDTH = 2, 3, 8
ALARM, CAUGHT = 1e-4, 1e-9
NAMES = [*RULES, "gumbel"]


def rule_of(name: str, b: int, seed: int) -> Rule:
    """The rule for b requests."""
    if name in RULES:
        return RULES[name]
    return gumbel(torch.randint(2**62, (b,), generator=torch.Generator().manual_seed(seed)))


class Markov(NamedTuple):
    """The target, a head that is wrong now and then, and the target's logits after each token."""

    model: Any
    head: DraftHead
    logits: Tensor  # [V, V], after each token


class Drafted(NamedTuple):
    """TREES trees at one place of a text, each verified once."""

    accepted: Accepted
    expected: Tensor  # [TREES] float64, accept length
    root: int


@pytest.fixture(scope="module", params=["eagle3", "peagle"])
def markov(request: pytest.FixtureRequest, markov_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Markov:
    model = AutoModelForCausalLM.from_pretrained(markov_target, dtype=torch.float32).eval()
    folder = tmp_path_factory.mktemp("head")
    if request.param == "eagle3":
        tiny_models.markov_eagle3_head(folder, markov_target, reduced=True, wrong=0.3)
    else:
        kept = sorted(set(tiny_models.read_markov_map(markov_target).tolist()))
        peagle_models.peagle_head(folder, markov_target, kept, wrong=0.3)
    with torch.no_grad():
        logits = model(torch.arange(model.config.vocab_size)[:, None]).logits[:, 0]
    return Markov(model, load_head(model, markov_target, folder, algorithm="EAGLE3"), logits)


@pytest.fixture(scope="module")
def drafted_by(markov: Markov) -> dict[str, Drafted]:
    return {name: draft_and_verify(markov, rule_of(name, TREES, 1), seed=1) for name in NAMES}


@torch.no_grad()
def draft_and_verify(markov: Markov, rule: Rule, seed: int) -> Drafted:
    """TREES independent trees after one text. The head is wrong after its last token."""
    gen = torch.Generator().manual_seed(seed)
    tokens = [*PROMPT, *plain_greedy(markov.model, PROMPT, 4)]
    prefill = prefill_head(markov.head, tokens, target_features(markov.model, markov.head, tokens))
    roots = torch.full((TREES,), len(tokens) - 1)
    params = SamplingParams.of(TREES, TEMPERATURE)
    trees, proposals = draft_trees(markov.head, tokens, prefill, roots, rule, params, gen, Shape(STEPS, TOPK, WIDTH))
    logits = markov.logits[trees.tokens]  # [TREES, WIDTH, V]
    u = torch.rand(TREES, STEPS + 1, TOPK + 1, dtype=torch.float64, generator=gen)
    accepted = rule.verify(trees, logits.flatten(0, 1), params, proposals, u, STEPS + 1, roots)
    expected = expected_accept_length(trees, (logits / TEMPERATURE).softmax(-1), proposals)
    return Drafted(accepted, expected, tokens[-1])


def first_token_p_value(drafted: Drafted, markov: Markov) -> float:
    """Chi-square of the first tokens against the target's distribution; cells that expect fewer than 5 are pooled."""
    wanted = TREES * (markov.logits[drafted.root] / TEMPERATURE).double().softmax(-1)
    seen = torch.bincount(drafted.accepted.tokens[:, 0], minlength=len(wanted)).double()
    large = wanted >= 5
    assert large.sum() > 200
    seen = torch.cat([seen[large], seen[~large].sum()[None]])
    wanted = torch.cat([wanted[large], wanted[~large].sum()[None]])
    if wanted[-1] == 0:
        seen, wanted = seen[:-1], wanted[:-1]
    return float(scipy.stats.chi2.sf(float(((seen - wanted) ** 2 / wanted).sum()), len(seen) - 1))


def expectation_p_value(drafted: Drafted) -> float:
    """Two-sided z-test of the accept lengths against their expectations."""
    error = drafted.accepted.lengths.double() - drafted.expected
    return float(2 * scipy.stats.norm.sf(abs(error.mean() / error.std()) * TREES**0.5))


@pytest.mark.parametrize("rule", NAMES)
def test_rules_are_lossless_and_their_accept_length_is_expected(
    rule: str, markov: Markov, drafted_by: dict[str, Drafted]
) -> None:
    drafted = drafted_by[rule]
    assert first_token_p_value(drafted, markov) > ALARM
    if rule in RULES:
        assert expectation_p_value(drafted) > ALARM
    else:  # the draft knows what the target draws: more than of children that are independent of it
        assert drafted.accepted.lengths.double().mean() > drafted.expected.mean() + 0.1
    assert set(drafted.accepted.lengths.tolist()) == {1, 2, 3}  # refusals, and walks to the last level


def test_refusal_without_residual_is_caught(markov: Markov) -> None:
    """Negative control: drawing from p itself after a refusal makes the refused tokens too likely."""
    broken = RULES["recursive_rejection"]._replace(verify=whole_p_after_rejection)
    drafted = draft_and_verify(markov, broken, seed=1)
    assert first_token_p_value(drafted, markov) < CAUGHT


def test_children_with_the_targets_noise_under_a_draw_of_its_own_are_caught(markov: Markov) -> None:
    """Negative control: a sampled child is tested as if it had been drawn from q alone, by noise that it shares."""

    def verify(tree: Any, logits: Tensor, params: SamplingParams, *rest: Any) -> Accepted:
        accepted = rule.verify(tree, logits, params, *rest)
        first = tree.tokens[:, 1]  # the child with the most noise is taken whatever the target draws
        tokens = accepted.tokens.clone()
        tokens[:, 0] = first.where(tree.parents[:, 1] == 0, tokens[:, 0])
        return accepted._replace(tokens=tokens)

    rule = rule_of("gumbel", TREES, 1)
    assert first_token_p_value(draft_and_verify(markov, rule._replace(verify=verify), seed=1), markov) < CAUGHT


def test_expectation_of_another_rule_is_caught(drafted_by: dict[str, Drafted]) -> None:
    """Negative control: the accept lengths of one rule are not those that another rule is expected to have."""
    mixed = drafted_by["sampled_child"]._replace(expected=drafted_by["target_only"].expected)
    assert expectation_p_value(mixed) < CAUGHT


@pytest.mark.parametrize("rule", NAMES)
def test_decoder_emits_the_targets_next_token_as_often_as_the_target(rule: str, markov: Markov) -> None:
    """Whether a token is the most likely one after the token before it: independent, with a known probability."""
    params, gen = SamplingParams.of(1, 2.5), torch.Generator().manual_seed(2)
    following = markov.logits.argmax(-1).tolist()
    p = (markov.logits / 2.5).softmax(-1).amax(-1)
    assert p.max() - p.min() < 1e-4
    right = n = rounds = 0
    for seed in range(5):
        out = speculative_sample(
            markov.model, markov.head, PROMPT, 30, rule_of(rule, 1, seed), params, gen, Shape(STEPS, TOPK, WIDTH)
        )
        text = [PROMPT[-1], *out.tokens]
        right += sum(following[a] == b for a, b in zip(text, text[1:], strict=False))
        n, rounds = n + len(out.tokens), rounds + len(out.accept_lengths)
    assert n == 150 and rounds < 110  # drafts are accepted: this is not plain sampling
    assert scipy.stats.binomtest(right, n, float(p[0])).pvalue > ALARM
    assert scipy.stats.binomtest(right, n, float(p[0]) - 0.3).pvalue < CAUGHT  # this many tokens would show an error


@pytest.mark.parametrize("rule", NAMES)
def test_greedy_requests_equal_plain_greedy(rule: str, markov: Markov) -> None:
    params, gen = SamplingParams.of(1, 0.0), torch.Generator().manual_seed(3)
    out = speculative_sample(markov.model, markov.head, PROMPT, 30, rule_of(rule, 1, 0), params, gen, Shape(3, 2, 8))
    assert out.tokens == plain_greedy(markov.model, PROMPT, 30)
    assert max(out.accept_lengths) == 4


@pytest.mark.parametrize("rule", NAMES)
@torch.no_grad()
def test_trees_of_one_text_are_the_trees_of_its_beginnings(
    rule: str, tiny_target: Path, tiny_eagle3_reduced: Path
) -> None:
    """A tree at a place of a text, and the target's logits on it, are those of the text up to there alone."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    head = load_head(model, tiny_target, tiny_eagle3_reduced, algorithm="EAGLE3")
    tokens, shape = [*PROMPT, 9, 200, 31, 8, 8, 60], Shape(3, 3, 12)
    prefill = prefill_head(head, tokens, target_features(model, head, tokens))
    for root in (4, 9, 12):
        alone: SamplingParams = SamplingParams.of(1, 1.5)
        seeds = (torch.Generator().manual_seed(root) for _ in range(2))
        of = rule_of(rule, 1, root)
        trees, proposals = draft_trees(head, tokens, prefill, torch.tensor([root]), of, alone, next(seeds), shape)
        tree, proposed = draft_tree(model, head, tokens[: root + 1], of, alone, next(seeds), shape)
        assert all(torch.equal(a, b) for a, b in zip(trees, tree, strict=True))
        torch.testing.assert_close(proposals.weights, proposed.weights, rtol=1e-4, atol=1e-7)
        wanted = path_logits(model, tokens[: root + 1], tree)
        found = tree_logits(model, tokens, torch.tensor([2, root]), type(tree)(*(x.repeat(2, 1) for x in tree)))
        torch.testing.assert_close(found[1], wanted, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(found[0], wanted, rtol=1e-2, atol=1e-2)  # the other place has another text before it
