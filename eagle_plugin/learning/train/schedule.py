"""The progress of a run: its budget, its phases and the learning rate."""

from __future__ import annotations

import math

from eagle_plugin.learning.train.recipe import BudgetSettings, OptimiserSettings, PhaseSettings


def spent_share(budget: BudgetSettings, *, tokens: int, epochs: float, updates: int, seconds: float) -> float:
    """The share of the budget that is spent, 0 to 1 or more; 1 for an empty budget."""
    if budget.tokens is not None:
        return tokens / budget.tokens
    if budget.epochs is not None:
        return epochs / budget.epochs
    if budget.updates is not None:
        return updates / budget.updates if budget.updates else 1.0
    return seconds / (60 * (budget.minutes or 1))


def phase_at(phases: list[PhaseSettings], progress: float) -> int:
    """Index of the phase that a run is in after `progress` of its budget."""
    end = 0.0
    for i, phase in enumerate(phases[:-1]):
        end += phase.share
        # The shares are decimal fractions: rounding of their sum must not move a boundary by one update.
        if progress < end - 1e-9:
            return i
    return len(phases) - 1


def learning_factor(optimiser: OptimiserSettings, phase: PhaseSettings, progress: float) -> float:
    """The factor of the optimiser's learning rates: warm-up, decay to 0 at the end, the phase's peak."""
    peak = 1.0 if phase.lr is None else phase.lr / optimiser.lr
    if progress < optimiser.warm_up:
        # Never 0: the first update of a run has progress 0.
        return peak * max(progress, optimiser.warm_up / 100) / optimiser.warm_up
    left = min(1.0, max(0.0, (1 - progress) / (1 - optimiser.warm_up)))
    if optimiser.schedule == "constant":
        return peak
    return peak * (left if optimiser.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * left))
