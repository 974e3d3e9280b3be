"""The rule is lossless: the joint distribution of the first tokens against exact enumeration, and broken rules fail.

Every test draws with fixed seeds, so it passes always or never; the stated false-alarm rate is that of another choice
of seeds. FALSE_ALARM is shared by all the tests that must pass here (Bonferroni).
"""

from __future__ import annotations

from typing import Any

import broken_verifier
import pytest
import torch
from torch import Tensor
from toy_model import decode, exact_joint, make_toy, p_value

from eagle_plugin.core import propose as proposing
from eagle_plugin.core import verify as verifying
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels import sampling

SETTINGS: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0},
    "T=0.7 top-p": {"temperature": 0.7, "top_p": 0.9},
    "T=1.3 top-k": {"temperature": 1.3, "top_k": 4},
    "T=1 min-p": {"temperature": 1.0, "min_p": 0.1},
    "T=0.8 all": {"temperature": 0.8, "top_p": 0.95, "top_k": 5, "min_p": 0.05},
}
REQUESTS, FALSE_ALARM = 40_000, 1e-4
ALARM = FALSE_ALARM / (2 * len(SETTINGS))
CAUGHT = 1e-12  # what a broken rule must fall below


# Single filters, of which "all" has every one, are in the matrix.
@pytest.mark.parametrize(
    "setting",
    [pytest.param(one, marks=pytest.mark.matrix) if one in ("T=1.3 top-k", "T=1 min-p") else one for one in SETTINGS],
)
def test_kernels_have_the_targets_joint_distribution(setting: str) -> None:
    toy, params = make_toy(1), SamplingParams.of(REQUESTS, **SETTINGS[setting])
    tokens, length = decode(toy, REQUESTS, params)
    assert p_value(tokens, exact_joint(toy, params)) > ALARM
    assert length > 1.5  # drafts are accepted: this is not plain sampling in disguise


# One filter and all of them; of the others the kernels, which say what the oracle says, have the distribution above.
@pytest.mark.parametrize(
    "setting",
    [one if one in ("T=0.7 top-p", "T=0.8 all") else pytest.param(one, marks=pytest.mark.matrix) for one in SETTINGS],
)
def test_oracle_has_the_targets_joint_distribution(setting: str) -> None:
    toy, params = make_toy(2), SamplingParams.of(1000, **SETTINGS[setting])
    tokens, _ = decode(toy, 1000, params, propose=proposing.propose, verify=verifying.verify_tree)
    assert p_value(tokens, exact_joint(toy, params)) > ALARM


@pytest.mark.parametrize("setting", SETTINGS)
def test_kernels_say_what_the_oracle_says(setting: str) -> None:
    toy, params = make_toy(3), SamplingParams.of(500, **SETTINGS[setting])
    ours, _ = decode(toy, 500, params)
    wanted, _ = decode(toy, 500, params, propose=proposing.propose, verify=verifying.verify_tree)
    # The same noise: only where two tokens are equal up to rounding may another one be drawn.
    assert (ours != wanted).any(dim=1).sum() <= 1


def test_greedy_requests_say_the_argmax() -> None:
    toy, params = make_toy(4), SamplingParams.of(50, 1.0, top_k=1)
    tokens, length = decode(toy, 50, params)
    assert exact_joint(toy, params).max() == 1.0
    assert p_value(tokens, exact_joint(toy, params)) == 1.0
    assert length > 1.0


# Each of the broken rules below is one that could be believed.


def one_noise_for_all(
    tree: DraftTree, logits: Tensor, params: SamplingParams, keys: Tensor, lengths: Tensor, longest: int
) -> Accepted:
    """Every round draws with the noise of the first."""
    return sampling.verify_tree(tree, logits, params, keys, torch.zeros_like(lengths), longest)


def no_draw_of_what_was_refused(
    tree: DraftTree, logits: Tensor, params: SamplingParams, keys: Tensor, lengths: Tensor, longest: int
) -> Accepted:
    """Where no child of the root is drawn, draw again by other noise: unlikely tokens come more often."""
    first, again = (sampling.verify_tree(tree, logits, params, x, lengths, longest) for x in (keys, keys + 1))
    refused = first.lengths == 1
    return Accepted(
        *(torch.where(refused.view(-1, *[1] * (a.dim() - 1)), b, a) for a, b in zip(first, again, strict=True))
    )


def half_of_the_noise(
    tree: DraftTree, logits: Tensor, params: SamplingParams, keys: Tensor, lengths: Tensor, longest: int
) -> Accepted:
    """As if the target were sharper."""
    sharper = params._replace(temperatures=params.temperatures / 2)
    return sampling.verify_tree(tree, logits, sharper, keys, lengths, longest)


BROKEN = {
    "every draft accepted": broken_verifier.every_draft_accepted,
    "one noise for all nodes of a round": broken_verifier.one_noise_for_a_round,
    "one noise for all rounds": one_noise_for_all,
    "a second draw after a refusal": no_draw_of_what_was_refused,
    "half of the noise": half_of_the_noise,
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rules_are_caught(name: str) -> None:
    toy, params = make_toy(1), SamplingParams.of(REQUESTS, 0.8)
    tokens, _ = decode(toy, REQUESTS, params, verify=BROKEN[name])
    assert p_value(tokens, exact_joint(toy, params)) < CAUGHT


def test_penalties_and_masks_of_one_node_count_at_that_node_only() -> None:
    """The logits of a node decide at that node: p of one node moved to its parent is caught."""
    toy, params = make_toy(1), SamplingParams.of(REQUESTS, 1.0)

    def shifted(tree: DraftTree, logits: Tensor, *rest: Any) -> Accepted:
        b, width = tree.tokens.shape
        rows = torch.arange(b)[:, None] * width + tree.parents.clamp(min=0)
        return sampling.verify_tree(tree, logits[rows.view(-1)], *rest)

    tokens, _ = decode(toy, REQUESTS, params, verify=shifted)
    assert p_value(tokens, exact_joint(toy, params)) < CAUGHT


def test_filters_keep_what_the_engine_keeps() -> None:
    """target_distribution against SGLang's own torch sampler: the same tokens survive, with the same weights."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch as engine

    from eagle_plugin.core.sampling import target_distribution

    gen = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(64, 50, generator=gen)
    params = SamplingParams.of(64)._replace(
        temperatures=torch.rand(64, generator=gen) + 0.3,
        top_ks=torch.randint(2, 60, (64,), generator=gen).int(),
        top_ps=torch.rand(64, generator=gen) * 0.9 + 0.1,
        min_ps=torch.rand(64, generator=gen) * 0.2,
    )
    probs = (logits / params.temperatures[:, None]).softmax(-1)
    _, weights, ids, _ = engine(
        probs, params.top_ks, params.top_ps, params.min_ps, True, None, None, return_filtered_probs=True
    )
    wanted = torch.zeros_like(probs).scatter_(1, ids.long(), weights)
    torch.testing.assert_close(
        target_distribution(logits, params).float(), wanted / wanted.sum(-1, keepdim=True), rtol=1e-5, atol=1e-7
    )
