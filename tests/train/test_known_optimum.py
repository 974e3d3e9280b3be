"""Every head learns a Markov target as well as possible: down to the entropy, which is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from toy_targets import AUX_LAYERS, MarkovTarget, head_config
from transformers import LlamaConfig

from eagle_plugin.heads.dflash import DFlashHead
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.eagle2 import Eagle2Head
from eagle_plugin.heads.eagle3 import Eagle3Head
from eagle_plugin.heads.peagle import PEagleHead
from eagle_plugin.learning.train.batches import Batch
from eagle_plugin.learning.train.methods import ObjectiveSettings
from eagle_plugin.learning.train.objectives import METRICS, Objective, summarize

STATES, HIDDEN, STEPS = 12, 16, 3


@pytest.fixture(scope="module")
def target() -> MarkovTarget:
    return MarkovTarget(STATES, HIDDEN)


def learn(
    head: DraftHead,
    target: MarkovTarget,
    settings: ObjectiveSettings,
    sample: Callable[[], Batch],
    iterations: int,
) -> dict[str, list[float]]:
    """Train, and return the measures over the last tenth."""
    objective = Objective(head, target.readout, settings)
    optimiser = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=2e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.02, iterations)
    sums = torch.zeros(settings.steps, len(METRICS), dtype=torch.float64)
    for i in range(iterations):
        batch = sample()
        plan = objective.plan(batch, i)
        losses = objective(batch, plan, plan.totals)
        optimiser.zero_grad()
        losses.loss.backward()
        optimiser.step()
        schedule.step()
        if i >= iterations * 0.9:
            sums += losses.sums
    return summarize(sums)


def config(target: MarkovTarget, **values: object) -> LlamaConfig:
    sizes = {"vocab_size": target.vocab, "draft_vocab_size": STATES, "num_attention_heads": 2, "num_key_value_heads": 1}
    return head_config(**sizes, **values)


def fresh(build: Callable[[], DraftHead]) -> DraftHead:
    """A head as torch initialises it, which learns faster than one with large values everywhere."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = build()
        head.embedding.normal_()
    return head


def test_eagle3_reaches_the_entropy_at_every_step(target: MarkovTarget) -> None:
    head = fresh(lambda: Eagle3Head(config(target, fc_norm=True, norm_output=True), AUX_LAYERS))
    settings = ObjectiveSettings(steps=STEPS, dtype=torch.float32)
    reached = learn(head, target, settings, lambda: target.batch(8, 24), 300)["loss"]
    assert reached == pytest.approx([target.entropy()] * STEPS, rel=0.02)


def test_parallel_drafting_reaches_the_entropy_of_what_it_knows(target: MarkovTarget) -> None:
    head = fresh(lambda: PEagleHead(config(target, mask_token_id=STATES), AUX_LAYERS))
    settings = ObjectiveSettings(steps=STEPS, decay=1.0, dtype=torch.float32, keep_rate=0.9)
    reached = learn(head, target, settings, lambda: target.batch(6, 32), 350)["loss"]
    best = [target.entropy(depth + 1) for depth in range(STEPS)]
    assert best[0] < 0.8 * best[1] < 0.8 * best[2]  # otherwise depth would have no effect
    assert reached == pytest.approx(best, rel=0.02)


@pytest.mark.matrix
@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
def test_blocks_reach_the_entropy_of_what_they_know(target: MarkovTarget, causal: bool) -> None:
    shape = {"mask_token_id": STATES, "block_size": STEPS + 1, "is_causal": causal}
    head = fresh(lambda: DFlashHead(config(target, **shape), AUX_LAYERS))
    settings = ObjectiveSettings(steps=STEPS, dtype=torch.float32, keep_rate=0.9)
    reached = learn(head, target, settings, lambda: target.batch(6, 32), 500)["loss"]
    assert reached == pytest.approx([target.entropy(depth + 1) for depth in range(STEPS)], rel=0.02)


def test_eagle2_reaches_the_noise_of_the_features(target: MarkovTarget) -> None:
    """The token determines the next feature except for its noise; a standard deviation d costs d^2 / 2 in smooth L1."""
    deviation = 0.1
    head = fresh(lambda: Eagle2Head(config(target)))
    assert isinstance(head, Eagle2Head)
    head.lm_head.copy_(target.readout.weight)
    head.fc.bias.data.zero_()
    settings = ObjectiveSettings(steps=1, dtype=torch.float32, noise=0.0, classification=0.0)
    measures = learn(head, target, settings, lambda: target.batch(8, 24, deviation), 300)
    assert measures["regression"][0] == pytest.approx(deviation**2 / 2, rel=0.05)
