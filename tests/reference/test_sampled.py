"""Sampled drafting and verification by the reference: the text has the target's distribution and depends on its key.

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
from broken_verifier import FAULTS, Verify, one_noise_for_a_round
from gtest import g_test, p_values
from reference_decoder import draft_tree, plain_greedy, served_head, speculative_sample
from sampling_distribution import distribution
from torch import Tensor
from transformers import AutoModelForCausalLM

from eagle_plugin.core.gumbel import draw_tokens
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.verify import verify_tree
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.learning.reference.draft import draft_trees, prefill_head
from eagle_plugin.learning.reference.target import path_logits, target_features, tree_logits

PROMPT = [0, 40, 41, 99, 120, 77, 5]
SETTING = {"temperature": 4.0, "top_p": 0.7}
TREES, LENGTH = 1500, 4  # responses, and their tokens
SHAPE = Shape(LENGTH - 1, 3, 10)
# Where the kind of head matters little: drafts never decide the text, which the tests without this mark show for both.
ANY_HEAD = pytest.mark.parametrize(
    "markov", ["eagle3", pytest.param("peagle", marks=pytest.mark.matrix)], indirect=True
)
SHAPES = [Shape.chain(1), Shape.chain(5), Shape(2, 3, 8), Shape(4, 4, 16)]
ALARM, CAUGHT = 1e-4, 1e-9


class Markov(NamedTuple):
    """The target, a head that is wrong now and then, and the target's logits after each token."""

    model: Any
    head: DraftHead
    logits: Tensor  # [V, V], after each token
    varied: Tensor  # logits in which no two tokens are equal, for filters cut equal ones as they like


def keys(n: int, seed: int = 1) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=torch.Generator().manual_seed(seed))


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
    varied = logits + 0.5 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    return Markov(model, served_head(markov_target, folder), logits, varied)


@pytest.fixture(scope="module")
def plain(markov: Markov) -> Tensor:
    """Responses [8 * TREES, LENGTH] int64 that the target samples."""
    gen, last, responses = torch.Generator().manual_seed(3), torch.full((8 * TREES,), text(markov)[-1]), []
    p = distribution(markov.varied, torch.zeros_like(markov.varied), SETTING)
    for _ in range(LENGTH):
        last = torch.multinomial(p[last], 1, generator=gen)[:, 0]
        responses.append(last)
    return torch.stack(responses, dim=1)


def text(markov: Markov) -> list[int]:
    """That is continued; the head is wrong after its last token."""
    return [*PROMPT, *plain_greedy(markov.model, PROMPT, 4)]


@torch.no_grad()
def one_round(markov: Markov, *, verify: Verify = verify_tree, draft_seed: int = 1) -> tuple[Tensor, Tensor]:
    """Responses [TREES, LENGTH] int64, drafted and verified once and then drawn plainly, and the accept lengths."""
    tokens, rng_keys = text(markov), keys(TREES)
    prefill = prefill_head(markov.head, tokens, target_features(markov.model, markov.head, tokens))
    roots, params = torch.full((TREES,), len(tokens) - 1), SamplingParams.of(TREES, **SETTING)  # type: ignore[arg-type]
    trees = draft_trees(markov.head, tokens, prefill, roots, params, keys(TREES, draft_seed), SHAPE)
    accepted = verify(trees, markov.varied[trees.tokens].flatten(0, 1), params, rng_keys, roots, LENGTH)
    responses = accepted.tokens.clone()
    for i in range(1, LENGTH):
        drawn = draw_tokens(markov.varied[responses[:, i - 1]], params, rng_keys, roots + i)
        responses[:, i] = torch.where(accepted.lengths > i, responses[:, i], drawn)
    return responses, accepted.lengths


@pytest.fixture(scope="module")
def healthy(markov: Markov) -> tuple[Tensor, Tensor]:
    return one_round(markov)


def compare(responses: Tensor, plain: Tensor) -> dict[str, float]:
    """p-values of the hypothesis that both have one distribution; noise that is used twice repeats tokens."""
    repeats = ((x[:, 1:] == x[:, :-1]).sum(1).numpy() for x in (responses, plain))
    return p_values(responses.numpy(), plain.numpy()) | {"repeats": g_test(*repeats)}


def test_responses_have_the_targets_distribution(healthy: tuple[Tensor, Tensor], plain: Tensor) -> None:
    responses, lengths = healthy
    found = compare(responses, plain)
    assert min(found.values()) > ALARM / len(found), found
    assert set(lengths.tolist()) == {1, 2, 3, 4}  # refusals, and walks to the last level


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "none"])
@ANY_HEAD
def test_a_broken_verifier_is_caught(fault: str, markov: Markov, plain: Tensor) -> None:
    """Negative controls; a verifier does not know which kind of head drafted."""
    responses, _ = one_round(markov, verify=FAULTS[fault])
    assert min(compare(responses, plain).values()) < CAUGHT


def test_drafts_decide_the_accept_length_and_never_the_text(markov: Markov, healthy: tuple[Tensor, Tensor]) -> None:
    """Drafts with another noise than the target's are accepted less often."""
    responses, lengths = healthy
    same, fewer = one_round(markov, draft_seed=2)
    assert torch.equal(same, responses)
    assert lengths.double().mean() > fewer.double().mean() + 0.1


@torch.no_grad()
def draw_plainly(markov: Markov, n: int, params: SamplingParams, rng_keys: Tensor) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(n):
        logits = markov.model(torch.tensor([tokens])).logits[0, -1:].float()
        tokens.append(int(draw_tokens(logits, params, rng_keys, torch.tensor([len(tokens) - 1]))))
    return tokens[len(PROMPT) :]


@ANY_HEAD
def test_a_text_depends_on_its_key_and_not_on_the_shape(markov: Markov) -> None:
    params, n = SamplingParams.of(1, 2.5, top_p=0.9), 20
    responses = [draw_plainly(markov, n, params, keys(1, seed)) for seed in range(2)]
    assert responses[0] != responses[1]
    for shape in SHAPES:
        for seed in range(2):
            found = speculative_sample(markov.model, markov.head, PROMPT, n, params, keys(1, seed), shape)
            assert found.tokens == responses[seed]
    assert len(found.accept_lengths) < n - 1  # drafts are accepted
    broken = speculative_sample(
        markov.model, markov.head, PROMPT, n, params, keys(1, 0), SHAPES[-1], verify=one_noise_for_a_round
    )
    assert broken.tokens != responses[0]


@ANY_HEAD
def test_decoder_emits_the_targets_next_token_as_often_as_the_target(markov: Markov) -> None:
    """Whether a token is the most likely one after the token before it: independent, with a known probability."""
    params = SamplingParams.of(1, 2.5)
    following = markov.logits.argmax(-1).tolist()
    p = (markov.logits / 2.5).softmax(-1).amax(-1)
    assert p.max() - p.min() < 1e-4
    right = n = rounds = 0
    for seed in range(5):
        out = speculative_sample(markov.model, markov.head, PROMPT, 30, params, keys(1, seed), Shape(2, 3, 8))
        tokens = [PROMPT[-1], *out.tokens]
        right += sum(following[a] == b for a, b in zip(tokens, tokens[1:], strict=False))
        n, rounds = n + len(out.tokens), rounds + len(out.accept_lengths)
    assert n == 150 and rounds < 110  # drafts are accepted: this is not plain sampling
    assert scipy.stats.binomtest(right, n, float(p[0])).pvalue > ALARM
    assert scipy.stats.binomtest(right, n, float(p[0]) - 0.3).pvalue < CAUGHT  # this many tokens would show an error


@ANY_HEAD
def test_greedy_requests_equal_plain_greedy(markov: Markov) -> None:
    out = speculative_sample(markov.model, markov.head, PROMPT, 30, SamplingParams.greedy(1), keys(1), Shape(3, 2, 8))
    assert out.tokens == plain_greedy(markov.model, PROMPT, 30)
    assert max(out.accept_lengths) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@torch.no_grad()
def test_trees_of_one_text_are_the_trees_of_its_beginnings(
    temperature: float, tiny_target: Path, tiny_eagle3_reduced: Path
) -> None:
    """A tree at a place of a text, and the target's logits on it, are those of the text up to there alone."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    head = served_head(tiny_target, tiny_eagle3_reduced)
    tokens, shape = [*PROMPT, 9, 200, 31, 8, 8, 60], Shape(3, 3, 12)
    prefill = prefill_head(head, tokens, target_features(model, head, tokens))
    alone = SamplingParams.of(1, temperature)
    for root in (4, 9, 12):
        trees = draft_trees(head, tokens, prefill, torch.tensor([root]), alone, keys(1), shape)
        tree = draft_tree(model, head, tokens[: root + 1], alone, keys(1), shape)
        assert all(torch.equal(a, b) for a, b in zip(trees, tree, strict=True))
        other = draft_tree(model, head, tokens[: root + 1], alone, keys(1, 2), shape)
        assert torch.equal(other.tokens, tree.tokens) == (temperature == 0)
        wanted = path_logits(model, tokens[: root + 1], tree)
        found = tree_logits(model, tokens, torch.tensor([2, root]), type(tree)(*(x.repeat(2, 1) for x in tree)))
        torch.testing.assert_close(found[1], wanted, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(found[0], wanted, rtol=1e-2, atol=1e-2)  # the other place has another text before it
