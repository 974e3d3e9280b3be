"""Draft trees as sets of paths, and the best paths by search over Python's own tuples."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.runtime.round import Drafts

Path = tuple[int, ...]


def paths_of(drafts: Drafts, i: int) -> list[Path]:
    """The path of every node but the root, padding left out."""
    tokens, parents = drafts.tree.tokens[i].tolist(), drafts.tree.parents[i].tolist()
    found: dict[int, Path] = {0: ()}
    for node in range(1, len(tokens)):
        if parents[node] >= 0:
            found[node] = (*found[parents[node]], tokens[node])
    return [found[node] for node in sorted(found)][1:]


def best_paths(shape: Shape, logits_of: Callable[[Path], Tensor]) -> set[Path]:
    """The nodes that a best-first search with this topk keeps, over Python's own tuples."""
    best: list[tuple[float, Path]] = [(0.0, ())]
    candidates: list[tuple[float, Path]] = []
    for _ in range(shape.steps):
        level = []
        for score, path in best:
            logp = logits_of(path).log_softmax(0)
            for token in logp.argsort(descending=True)[: shape.topk].tolist():
                level.append((score + float(logp[token]), (*path, token)))
        candidates += level
        best = sorted(level, reverse=True)[: shape.topk]
    return {path for _, path in sorted(candidates, reverse=True)[: shape.width - 1]}
