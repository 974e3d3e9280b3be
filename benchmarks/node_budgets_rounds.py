"""Recorded rounds: every candidate with its path score and the chance that the target accepts it.

Where the target is greedy the chance is 0 or 1. The chance of a candidate is that of a walk in the tree of all
candidates. In a smaller tree a deterministic child is accepted as often: the mean over the draws of its siblings is the
target's probability of its token.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression

from benchmarks.simulate_traces import CAPS, MISSED, Trace

MOST_NODES = 32  # of one tree, the root included


class Rounds(NamedTuple):
    """T rounds at positions of some responses; C candidates of `CAPS`, in the order of `core.tree.CandidateTable`."""

    scores: np.ndarray  # [T, C] float32, the path scores: sums of log probabilities; -inf: no candidate
    reach: np.ndarray  # [T, C] float32, probability that the walk comes to the candidate
    starts: np.ndarray  # [responses] int32: first round of each text

    @classmethod
    def of_trace(cls, trace: Trace) -> Rounds:
        """The rounds of a greedy trace: the candidates on the target's path are reached."""
        reach = np.zeros_like(trace.scores)
        rounds, depths = np.nonzero(trace.path != MISSED)
        reach[rounds, trace.path[rounds, depths]] = 1.0
        return cls(trace.scores, reach, trace.starts)

    def save(self, path: Path) -> None:
        """Write the rounds; scores are rounded to 1/32, chances to 1/1024."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scores = (np.round(self.scores * 32) / 32).astype(np.float16)
        reach = np.round(self.reach * 1024).astype(np.int16)
        np.savez_compressed(path, scores=scores, reach=reach, starts=self.starts)

    @classmethod
    def load(cls, path: Path) -> Rounds:
        """Rounds that `save` wrote."""
        with np.load(path, allow_pickle=False) as data:
            reach = data["reach"].astype(np.float32) / 1024
            return cls(data["scores"].astype(np.float32), reach, data["starts"])

    @property
    def children(self) -> int:
        """Candidates per proposing node, the sampled ones included."""
        return self.scores.shape[1] // (1 + CAPS.draft_slots)

    def depths(self) -> np.ndarray:
        """The depth [C] of each candidate, from 1 on."""
        rows = np.arange(self.scores.shape[1]) // self.children  # proposing node of each candidate
        return np.where(rows == 0, 1, (rows - 1) // CAPS.topk + 2)

    def parents(self) -> np.ndarray:
        """The parent [T, C] of each candidate, -1 for the root: the candidates that the head reads are a level's best.

        Where rounding made two scores equal, it may be the other one.
        """
        depths, first = self.depths(), np.cumsum([0, self.children] + [CAPS.topk * self.children] * CAPS.steps)
        found = np.full(self.scores.shape, -1)
        for depth in range(2, CAPS.steps + 1):
            above = self.scores[:, depths == depth - 1]
            best = np.argsort(-above, axis=1, kind="stable")[:, : CAPS.topk] + first[depth - 2]
            found[:, depths == depth] = best.repeat(self.children, axis=1)
        return found

    def responses(self) -> np.ndarray:
        """The text [T] of each round."""
        return np.searchsorted(self.starts, np.arange(len(self.scores)), side="right") - 1


def calibrate(rounds: Rounds) -> np.ndarray:
    """The expected chance [T, C] float32 of each candidate, by depth and path score; no parent has less than its child.

    For each depth a rising step function from score to chance (isotonic regression). It is learned from every other
    text and used for the rest, and the other way round.
    """
    depths, parents, half = rounds.depths(), rounds.parents(), rounds.responses() % 2
    estimates = np.zeros_like(rounds.scores)
    for fold in (0, 1):
        learned, used = half != fold, np.flatnonzero(half == fold)
        for depth in range(1, CAPS.steps + 1):
            at = np.flatnonzero(depths == depth)
            known, rising = _fit(rounds.scores[learned][:, at].ravel(), rounds.reach[learned][:, at].ravel())
            found = np.interp(rounds.scores[np.ix_(used, at)], known, rising)
            if depth > 1:
                found = np.minimum(found, np.take_along_axis(estimates, parents.clip(min=0), 1)[np.ix_(used, at)])
            estimates[np.ix_(used, at)] = found
    return np.where(np.isneginf(rounds.scores), 0.0, estimates)


def _fit(scores: np.ndarray, reach: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    known, place = np.unique(scores[np.isfinite(scores)], return_inverse=True)
    weights = np.bincount(place)
    means = np.bincount(place, reach[np.isfinite(scores)]) / weights
    return known, isotonic_regression(means, weights=weights).x


class Ranked(NamedTuple):
    """The candidates of T rounds that a draft of some levels and children has, the best first; M per round."""

    estimates: np.ndarray  # [T, M] float32, descending; -inf: no candidate
    accepted: np.ndarray  # [T, M + 1] float32, expected accepted tokens of the tree of the first 0 .. M of them

    @classmethod
    def of(cls, rounds: Rounds, estimates: np.ndarray, steps: int, topk: int) -> Ranked:
        """Order candidates by estimates [T, C], equal ones by path score; no child's estimate is above its parent's."""
        is_there = candidates_of(rounds, steps, topk)
        kept = np.where(is_there, estimates, -np.inf)
        order = np.lexsort((-np.where(is_there, rounds.scores, -np.inf), -kept))[:, : MOST_NODES - 1]
        reach = np.where(is_there, rounds.reach, 0.0)
        accepted = np.take_along_axis(reach, order, 1).cumsum(1)
        return cls(np.take_along_axis(kept, order, 1), np.pad(accepted, ((0, 0), (1, 0))))


def candidates_of(rounds: Rounds, steps: int, topk: int) -> np.ndarray:
    """Which candidates [T, C] bool a draft of so many levels and deterministic children per node has.

    They are children of the root, or of the best topk nodes that such a draft has in the level above. A best node
    whose children were not recorded has none; that is rare.
    """
    depths, parents = rounds.depths(), rounds.parents()
    child = np.arange(rounds.scores.shape[1]) % rounds.children
    is_child = ((child < topk) | (child >= CAPS.topk)) & np.isfinite(rounds.scores)
    found = is_child & (depths == 1)
    reads = np.zeros_like(found)  # the head reads this node
    for depth in range(2, steps + 1):
        above = np.where(found & (depths == depth - 1), rounds.scores, -np.inf)
        best = np.argsort(-above, axis=1, kind="stable")[:, :topk]
        np.put_along_axis(reads, best, np.isfinite(np.take_along_axis(above, best, 1)), 1)
        found |= is_child & (depths == depth) & np.take_along_axis(reads, parents.clip(min=0), 1)
    return found


def allocate(estimates: np.ndarray, budgets: list[int]) -> np.ndarray:
    """How many of its candidates each request of a batch gets, [budgets, N, b] int64: the best of the whole batch.

    estimates [N, b, M]: of N batches, each request's candidates in descending order; -inf: no candidate. budgets:
    drafted nodes of a whole batch, without the roots. Of equal estimates those that are earlier in their own requests
    come first, so that requests that are alike get the same, or one more.
    """
    N, b, M = estimates.shape
    flat = estimates.transpose(0, 2, 1).reshape(N, M * b)
    order = np.argsort(-flat, axis=1, kind="stable")
    there = np.isfinite(np.take_along_axis(flat, order, 1))
    counts = np.zeros((len(budgets), N, b), dtype=np.int64)
    for i, budget in enumerate(budgets):
        taken = np.zeros((N, M * b), dtype=bool)
        np.put_along_axis(taken, order[:, :budget], there[:, :budget], 1)
        counts[i] = taken.reshape(N, M, b).sum(1)
    return counts
