"""The tree oracles against plain Python over sets of paths."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_plugin.core.tree import Frontier, chain_ancestors, grow_level, new_table, select_tree, topk_log_softmax

prop = settings(derandomize=True, deadline=None, max_examples=60, database=None)
Path = tuple[int, ...]


def bits(word: int) -> set[int]:
    return {j for j in range(64) if word >> j & 1}


@prop
@given(st.lists(st.sampled_from([-3.0, -0.5, 0.0, 1.0, 2.5, -math.inf, math.nan]), min_size=1, max_size=12), st.data())
def test_topk_is_the_sorted_log_softmax(row: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(row)))
    logp, index = topk_log_softmax(torch.tensor([row]), k)
    clean = [-math.inf if math.isnan(x) else x for x in row]
    total = sum(math.exp(x) for x in clean)
    order = sorted(range(len(row)), key=lambda i: (-clean[i], i))[:k]
    assert index[0].tolist() == order
    for found, i in zip(logp[0].tolist(), order, strict=True):
        wanted = math.log(math.exp(clean[i]) / total) if total and clean[i] > -math.inf else -math.inf
        assert found == wanted or math.isclose(found, wanted, abs_tol=1e-5)
        assert found <= 0


@st.composite
def growths(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    topk, k, depth = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return topk, k, depth, draw(st.integers(1, 64)), draw(st.integers(0, 2**31))


def grow_random_tree(topk: int, k: int, depth: int, seed: int, grid: bool):
    """Grow one tree with the oracle; return it with the path, score and table place of every candidate.

    The paths are recomputed here from parent_rows alone. grid: scores are multiples of 1/4, full of ties and exact.
    """
    gen = torch.Generator().manual_seed(seed)
    table = new_table(1, k + (depth - 1) * topk * k)
    previous: Frontier | None = None
    rows: list[Path] = [()]
    row_scores, offset = [0.0], 0
    candidates: list[tuple[Path, float]] = []
    slot_paths: dict[int, Path] = {}
    for level in range(1, depth + 1):
        logp = -torch.rand(1, len(rows), k, generator=gen)
        logp = (logp * 8).round() / 4 if grid else logp
        tokens = torch.randint(0, 1000, (1, len(rows), k), generator=gen)
        # siblings must differ for a path of tokens to name a candidate
        tokens = tokens * 64 + torch.arange(k)
        frontier = grow_level(table, offset, level, logp, tokens, previous, topk)
        for r, path in enumerate(rows):
            for j in range(k):
                score = torch.tensor(row_scores[r]) + logp[0, r, j] if previous else logp[0, r, j]
                candidates.append(((*path, int(tokens[0, r, j])), float(score)))
        # the frontier: the best of this level
        level_candidates = range(offset, offset + len(rows) * k)
        best = sorted(level_candidates, key=lambda c: (-candidates[c][1], c))[:topk]
        assert frontier.candidates[0].tolist() == best
        assert frontier.tokens[0].tolist() == [candidates[c][0][-1] for c in best]
        assert frontier.scores[0].tolist() == [candidates[c][1] for c in best]
        assert frontier.parent_rows[0].tolist() == [(c - offset) // k for c in best]
        offset += len(rows) * k
        rows, row_scores = [candidates[c][0] for c in best], [candidates[c][1] for c in best]
        for j, path in enumerate(rows):
            slot_paths[(level - 1) * topk + j] = path
        # every row sees exactly the draft-tail slots of its own ancestors and itself: no stranger's history
        for j, path in enumerate(rows):
            seen = sorted(slot_paths[slot] for slot in bits(int(frontier.ancestors[0, j])))
            assert seen == [path[:n] for n in range(1, level + 1)]
        previous = frontier
    return table, candidates


@prop
@given(growths(), st.booleans())
def test_select_keeps_the_best_paths_as_a_tree(case: tuple[int, int, int, int, int], grid: bool) -> None:
    topk, k, depth, width, seed = case
    table, candidates = grow_random_tree(topk, k, depth, seed, grid)
    C = table.scores.shape[1]
    tree = select_tree(table, torch.tensor([7]), width)
    n = min(width - 1, len(candidates))
    best = sorted(range(C), key=lambda c: (-float(table.scores[0, c]), c))[: min(width - 1, C)]
    kept = sorted(best)
    tokens, parents, depths = tree.tokens[0].tolist(), tree.parents[0].tolist(), tree.depths[0].tolist()
    assert (tokens[0], parents[0], depths[0]) == (7, -1, 0)

    def path_of(node: int) -> Path:
        return () if parents[node] < 0 else (*path_of(parents[node]), tokens[node])

    used = [c for c in kept if c < len(candidates)]
    assert [path_of(i + 1) for i in range(len(used))] == [candidates[c][0] for c in used]
    for node in range(1, n + 1):
        assert parents[node] < node
        assert depths[node] == len(path_of(node))
        ancestors, at = {0}, node
        while at:
            ancestors.add(at)
            at = parents[at]
        assert bits(int(tree.ancestors[0, node])) == ancestors


def test_padding_is_unreachable() -> None:
    table, candidates = grow_random_tree(2, 2, 1, 0, grid=False)
    tree = select_tree(table, torch.tensor([9]), 5)
    n = len(candidates)
    assert n == 2
    assert tree.tokens[0, n + 1 :].tolist() == [9, 9]
    assert tree.parents[0, n + 1 :].tolist() == [-1, -1]
    assert tree.depths[0, n + 1 :].tolist() == [0, 0]
    assert [bits(int(w)) for w in tree.ancestors[0, n + 1 :]] == [{0, 3}, {0, 4}]


def test_the_last_level_may_record_candidates_without_a_frontier() -> None:
    table = new_table(1, 3)
    frontier = grow_level(table, 0, 1, torch.tensor([[[-1.0, -2.0, -3.0]]]), torch.tensor([[[5, 6, 7]]]), None, 0)
    assert frontier.tokens.shape == (1, 0)
    assert table.tokens.tolist() == [[5, 6, 7]]


def test_node_63_has_the_sign_bit() -> None:
    table = new_table(1, 63)
    grow_level(table, 0, 1, -torch.arange(63.0).view(1, 1, 63), torch.arange(63).view(1, 1, 63), None, 0)
    tree = select_tree(table, torch.tensor([0]), 64)
    assert int(tree.ancestors[0, 63]) == -(2**63) + 1


def test_the_ancestors_of_a_chain() -> None:
    assert chain_ancestors(4, "cpu").tolist() == [0b1, 0b11, 0b111, 0b1111]
    assert chain_ancestors(64, "cpu")[-2:].tolist() == [2**63 - 1, -1]
