"""Traces for the simulator: the candidates that a head drafts at every position of a text, and which were right.

A trace has, per position, the scores of all candidates of the largest shape, and the path among them that the target
takes. All smaller trees follow from it by the rule of `policy.path_sums`. Positions of one text follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import grow_level, new_table
from eagle_plugin.policy.path_sums import PathSums

CAPS = Shape(7, 4, 64)
MISSED = 255  # in a path: the target left the candidates before this depth
CHUNK = 500  # positions whose trees are computed at once
SIBLINGS = (0.45, 0.2, 0.1)  # second to fourth child: their part of what the first one leaves
REQUEST_SPREAD, NODE_SPREAD, DEPTH_SLOPE = 0.7, 1.6, 0.05  # of the log odds of a first child


class PublishedHead(NamedTuple):
    """A published accept length that the synthetic trace of a target's head is calibrated to."""

    shape: Shape
    accept_length: float
    source: str


HEADS = {
    "Llama-3.1-8B": PublishedHead(Shape(5, 4, 64), 4.68, "sglang#4247, 5 steps, MT-bench; its topk is taken to be 4"),
    "Llama-3.3-70B": PublishedHead(
        Shape(7, 4, 64), 4.95, "5.39 of sglang#4247 (8B, 8 steps) times 5.63 / 6.13 of EAGLE-3 table 1, MT-bench"
    ),
    "Qwen3-Coder-30B-A3B": PublishedHead(Shape.chain(4), 4.30, "P-EAGLE model card, HumanEval, K = 4"),
    "GPT-OSS-120B": PublishedHead(Shape.chain(5), 2.68, "P-EAGLE model card, MT-bench, K = 5"),
}


class Trace(NamedTuple):
    """Of T positions; C candidates of `CAPS`, in the order of `core.tree.CandidateTable`."""

    scores: np.ndarray  # [T, C] float32
    path: np.ndarray  # [T, D] uint8: the accepted candidate of each depth, MISSED from where there is none
    starts: np.ndarray  # [responses] int32: first position of each text

    def save(self, path: Path) -> None:
        """Write the trace; scores are rounded to 1/32, so that a thousand positions take less than 200 KB."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scores = (np.round(self.scores * 32) / 32).astype(np.float16)
        np.savez_compressed(path, scores=scores, path=self.path, starts=self.starts)

    @classmethod
    def load(cls, path: Path) -> Trace:
        with np.load(path, allow_pickle=False) as data:
            return cls(data["scores"].astype(np.float32), data["path"], data["starts"])

    def accepted(self, shape: Shape) -> float:
        """Mean accepted drafted tokens of trees of this shape, over all positions."""
        return float(Outcomes.of(self, [shape]).accepted.mean())


class Outcomes(NamedTuple):
    """What a round at each position yields with each of J shapes."""

    shapes: tuple[Shape, ...]
    sums: np.ndarray  # [T, J, D] float32, the sums of path scores by depth
    accepted: np.ndarray  # [T, J] int64, accepted drafted tokens
    starts: np.ndarray  # [responses + 1] int64, the last one is T

    @classmethod
    def of(cls, trace: Trace, shapes: Sequence[Shape]) -> Outcomes:
        path_sums = PathSums(CAPS, shapes, "cpu")
        assert len(path_sums.shapes) == len(shapes)
        sums, accepted = [], []
        for first in range(0, len(trace.scores), CHUNK):
            scores = torch.from_numpy(trace.scores[first : first + CHUNK])
            path = torch.from_numpy(trace.path[first : first + CHUNK].astype(np.int64))  # [t, D]
            sums.append(path_sums(scores).transpose(0, 1))
            nodes = path_sums.nodes(scores)  # [J, t, C]
            taken = nodes.gather(-1, path.clamp(max=scores.shape[1] - 1).expand(len(nodes), *path.shape))
            taken &= path != MISSED
            accepted.append(taken.long().cumprod(-1).sum(-1).T)  # a node counts if all before it do
        return cls(
            tuple(path_sums.shapes),
            torch.cat(sums).numpy(),
            torch.cat(accepted).numpy(),
            np.append(trace.starts, len(trace.scores)).astype(np.int64),
        )


def synthesize(log_odds: float, responses: int = 40, length: int = 150, seed: int = 0) -> Trace:
    """A head whose scores are calibrated, as recorded heads' nearly are: the target takes a child by its probability.

    log_odds: mean log odds of a node's first child; they vary between positions of a text, as a slow random walk, and
    between nodes, and fall with the depth.
    """
    gen = torch.Generator().manual_seed(seed)
    steps = torch.randn(responses, length, generator=gen)
    walk = torch.zeros(responses)
    easy = []
    for t in range(length):
        walk = 0.9 * walk + (1 - 0.9**2) ** 0.5 * steps[:, t]
        easy.append(walk)
    means = (log_odds + REQUEST_SPREAD * torch.stack(easy, 1)).flatten()  # [T]
    T, topk = len(means), CAPS.topk
    table = new_table(T, topk + (CAPS.steps - 1) * topk * topk)
    path = torch.full((T, CAPS.steps), MISSED)
    frontier, row = None, torch.zeros(T, dtype=torch.int64)  # row: where the target's path is in the frontier, or -1
    offset = 0
    for depth in range(1, CAPS.steps + 1):
        rows = 1 if frontier is None else topk
        noise = NODE_SPREAD * torch.randn(T, rows, generator=gen)
        first = torch.sigmoid(means[:, None] - DEPTH_SLOPE * (depth - 1) + noise)  # [T, rows]
        chances = torch.stack([first, *((1 - first) * part for part in SIBLINGS)], -1)
        chances = chances.sort(dim=-1, descending=True).values  # [T, rows, K]
        keep = topk if depth < CAPS.steps else 0
        frontier = grow_level(table, offset, depth, chances.log(), torch.zeros_like(chances).long(), frontier, keep)
        own = chances[torch.arange(T), row.clamp(min=0)]  # [T, K]
        child = (torch.rand(T, 1, generator=gen) > own.cumsum(-1)).sum(-1)
        is_taken = (row >= 0) & (child < topk)
        candidate = offset + row * topk + child
        path[:, depth - 1] = torch.where(is_taken, candidate, MISSED)
        if depth < CAPS.steps:
            found = frontier.candidates == candidate[:, None]
            row = torch.where(is_taken & found.any(-1), found.long().argmax(-1), -1)
        offset += rows * topk
    return Trace(table.scores.numpy(), path.numpy().astype(np.uint8), np.arange(0, T, length, dtype=np.int32))


def calibrate(shape: Shape, accept_length: float) -> float:
    """The log odds at which the synthetic head has this accept length, with the bonus token, in trees of this shape."""
    low, high = -4.0, 8.0
    for _ in range(16):
        middle = (low + high) / 2
        if 1 + synthesize(middle, responses=20).accepted(shape) < accept_length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def synthetic_trace(target: str) -> Trace:
    """The trace of a target's published head."""
    head = HEADS[target]
    return synthesize(calibrate(head.shape, head.accept_length))
