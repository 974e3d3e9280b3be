"""Nodes by request: the allocation against brute force, the estimates, the costs, the recording, and one small run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import node_budgets
from benchmarks import node_budgets_compare as ways
from benchmarks.node_budgets_compare import ORACLE, RAW, SAME, Plan, compare, rank, walk
from benchmarks.node_budgets_costs import measured_costs, round_seconds, simulated_costs
from benchmarks.node_budgets_record import proposing_nodes, whole_tree
from benchmarks.node_budgets_rounds import Ranked, Rounds, allocate, calibrate, candidates_of
from benchmarks.simulate_rounds import accept_length
from benchmarks.simulate_traces import CAPS, MISSED, Outcomes, Trace, synthesize
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.tree import grow_level, new_table
from eagle_plugin.policy.shapes import shapes_within
from eagle_plugin.runtime import cost_files


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthesize(1.5, responses=8, length=60)


@pytest.fixture(scope="module")
def rounds(trace: Trace) -> Rounds:
    return Rounds.of_trace(trace)


# ---------------------------------------------------------------------------------------------------------------------
# Allocation


def test_the_allocation_is_the_best_of_all() -> None:
    """Against every way to give 0 to 4 candidates to each of three requests."""
    gen = np.random.default_rng(0)
    estimates = -np.sort(-gen.random((20, 3, 4)), axis=-1)
    found = allocate(estimates, [0, 1, 5, 12])
    for budget, counts in zip((0, 1, 5, 12), found, strict=True):
        for batch, given in zip(estimates, counts, strict=True):
            sums = np.pad(batch.cumsum(1), ((0, 0), (1, 0)))
            possible = (c for c in itertools.product(range(5), repeat=3) if sum(c) <= budget)
            best = max(sum(sums[i, n] for i, n in enumerate(c)) for c in possible)
            assert given.sum() == budget
            assert sum(sums[i, n] for i, n in enumerate(given)) == pytest.approx(best)


def test_requests_that_are_alike_get_the_same() -> None:
    """Also if all candidates of a request are alike; and a request that is surer gets more."""
    falling = np.tile(np.array([0.9, 0.5, 0.5, 0.1], dtype=np.float32), (1, 5, 1))
    for estimates in (falling, np.full((1, 5, 4), 0.3)):
        for nodes in (1, 2, 3, 4):
            assert (allocate(estimates, [5 * nodes])[0] == nodes).all()
        assert sorted(allocate(estimates, [7])[0, 0]) == [1, 1, 1, 2, 2]
    falling[0, 2] += 0.45
    assert allocate(falling, [10])[0, 0].argmax() == 2


def test_what_is_no_candidate_gets_no_node() -> None:
    estimates = np.array([[[0.9, -np.inf, -np.inf], [0.2, 0.1, -np.inf]]])
    assert allocate(estimates, [2, 6]).tolist() == [[[1, 1]], [[1, 2]]]


# ---------------------------------------------------------------------------------------------------------------------
# Rounds


def test_rounds_of_a_trace_yield_what_its_outcomes_say(trace: Trace, rounds: Rounds) -> None:
    shapes = [Shape(steps, CAPS.topk, width) for steps, width in ((1, 3), (2, 8), (3, 2), (7, 32))]
    outcomes = Outcomes.of(trace, shapes)
    for i, (steps, topk, width) in enumerate(shapes):
        ranked = Ranked.of(rounds, rounds.scores, steps, topk)
        assert ranked.accepted[:, width - 1].tolist() == outcomes.accepted[:, i].tolist()
        assert (np.diff(ranked.estimates[:, : width - 1]) <= 0).all()


@pytest.mark.parametrize(("steps", "topk"), [(1, 1), (4, 1), (3, 2), (7, 2)])
def test_smaller_drafts_are_trees(trace: Trace, rounds: Rounds, steps: int, topk: int) -> None:
    """Every node's parent is there; a level has topk children of topk nodes; chains are the first children's."""
    there, parents, depths = candidates_of(rounds, steps, topk), rounds.parents(), rounds.depths()
    assert not there[:, depths > steps].any() and (there[:, depths == 1].sum(1) == topk).all()
    t, c = np.nonzero(there & (depths > 1))
    assert there[t, parents[t, c]].all() and (c % CAPS.topk < topk).all()
    sizes = np.array([there[:, depths == d].sum(1) for d in range(2, steps + 1)])
    assert sizes.size == 0 or (sizes.max() == topk * topk and (sizes == topk * topk).mean() > 0.8)
    scores = np.take_along_axis(rounds.scores, parents.clip(min=0), 1)
    assert (rounds.scores <= scores)[:, depths > 1].all()
    t, d = np.nonzero(trace.path[:, 1:] != MISSED)  # the target's path goes from parent to child
    assert (parents[t, trace.path[t, d + 1]] == trace.path[t, d]).all()


def test_depths_and_responses(rounds: Rounds) -> None:
    depths = rounds.depths()
    assert [int((depths == d).sum()) for d in range(1, CAPS.steps + 1)] == [4] + [16] * 6
    assert (np.bincount(rounds.responses()) == 60).all()
    assert rounds.reach[:, depths == 1].sum(1).max() == 1


def test_calibrated_scores(trace: Trace, rounds: Rounds) -> None:
    """A calibrated head keeps its estimates, one whose scores are half as large gets them back."""
    half, mean = rounds._replace(scores=rounds.scores / 2), rounds.reach.mean()
    for of in (rounds, half):
        found = calibrate(of)
        assert found.mean() == pytest.approx(mean, rel=0.1) and np.exp(half.scores).mean() > 1.5 * mean
        surest = found[:, 0] > 0.9
        assert surest.any() and rounds.reach[surest, 0].mean() > 0.85
        # No text teaches its own estimates: other chances in the even responses change those of the odd ones only.
        even = of.responses() % 2 == 0
        changed = calibrate(of._replace(reach=np.where(even[:, None], 0.5, of.reach).astype(np.float32)))
        assert (changed[even] == found[even]).all() and (changed[~even] != found[~even]).any()


def test_no_calibrated_parent_has_less_than_its_child() -> None:
    """Even where deeper nodes are accepted more often than those above them with the same score."""
    gen = np.random.default_rng(0)
    scores = -gen.random((60, 100)).astype(np.float32)
    rounds = Rounds(scores, np.zeros_like(scores), np.array([0, 30], dtype=np.int32))
    rounds = rounds._replace(reach=np.where(rounds.depths() > 3, 0.9, 0.2) * np.ones_like(scores))
    assert calibrate(rounds)[:, rounds.depths() > 3].max() == pytest.approx(0.2)


def test_rounds_are_written_and_read(rounds: Rounds, tmp_path: Path) -> None:
    scores = rounds.scores.copy()
    scores[0, 0] = -np.inf
    rounds._replace(scores=scores).save(tmp_path / "new" / "rounds.npz")
    again = Rounds.load(tmp_path / "new" / "rounds.npz")
    assert np.isneginf(again.scores[0, 0]) and np.abs(again.scores[1:] - scores[1:]).max() < 0.02
    assert (again.reach == rounds.reach).all() and (again.starts == rounds.starts).all()


# ---------------------------------------------------------------------------------------------------------------------
# Ways and costs


def test_the_ways_to_give_nodes(rounds: Rounds) -> None:
    ranked = rank(rounds)
    picked = np.random.default_rng(0).integers(0, len(rounds.scores), (40, 8))
    found = {(way, plan): batches for way, plan, batches in compare(ranked, picked)}
    plan = Plan(3, 2, 4)
    of = {
        way: found[way, plan]
        for way in (SAME, RAW, ways.CALIBRATED, ways.CAPPED, ways.PADDED, ways.CAPPED_PADDED, ORACLE)
    }
    assert of[SAME].accepted < of[RAW].accepted < of[ORACLE].accepted
    assert of[ways.CAPPED].accepted <= of[ways.CALIBRATED].accepted == of[ways.PADDED].accepted
    assert (of[RAW].rows == 8 * 4).all() and of[SAME].rows.tolist() == [8 * 4]
    assert of[ways.PADDED].rows.min() >= 8 * 4 and of[ways.PADDED].rows.mean() > 8 * 4
    assert of[ways.CAPPED_PADDED].rows.max() <= 8 * 8 and of[ways.CAPPED].longest == 8
    assert (of[ORACLE].rows <= 8 * 4).all()
    assert (SAME, Plan(3, 2, 1.5)) not in found and (RAW, Plan(3, 2, 1.5)) in found
    assert found[RAW, Plan(*PLAIN)].accepted == 0


def test_requests_that_are_alike_gain_nothing(rounds: Rounds) -> None:
    """The same round for all requests: a negative control of the gain."""
    picked = np.repeat(np.random.default_rng(0).integers(0, len(rounds.scores), (40, 1)), 8, axis=1)
    found = {(way, plan): batches for way, plan, batches in compare(rank(rounds), picked)}
    for plan in (Plan(3, 2, 4), Plan(2, 4, 6), Plan(1, 1, 2)):
        assert found[RAW, plan].accepted == pytest.approx(found[SAME, plan].accepted)


def test_equal_trees_cost_what_the_tables_say() -> None:
    costs = simulated_costs()
    for shape in (PLAIN, Shape(1, 1, 2), Shape(3, 4, 16), Shape(7, 1, 8)):
        rows = np.full(3, 16 * shape.width)
        found = round_seconds(costs, shape.steps, shape.topk, shape.width, rows, 16, 1000)
        assert found == pytest.approx(costs.round(shape, 16, 16_000))
    few, many = (round_seconds(costs, 3, 4, 32, np.array([n]), 64, 1000) for n in (256, 1024))
    mean = round_seconds(costs, 3, 4, 32, np.array([256, 1024]), 64, 1000)
    assert few < many and mean == pytest.approx((few + many) / 2)


def test_walked_rounds_have_the_simulators_accept_length(trace: Trace, rounds: Rounds) -> None:
    shape, costs = Shape(3, 4, 8), simulated_costs()
    ranked = Ranked.of(rounds, rounds.scores, shape.steps, shape.topk)
    rate = walk(rounds, ranked, Plan(*shape), SAME, costs, 8, 1000, batches=64, seed=0)
    wanted = accept_length(Outcomes.of(trace, shapes_within(CAPS)), shape)
    assert rate * costs.round(shape, 8, 8000) / 8 == pytest.approx(wanted, rel=0.03)
    more = walk(rounds, ranked, Plan(*shape), RAW, costs, 8, 1000, batches=64, seed=0)
    assert rate < more < 1.3 * rate


def test_costs_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path / "kernels"))
    key = {"engine": "vllm 1", "target": "models/small", "dtype": "torch.bfloat16", "device": "cpu", "threads": 2}
    quiet = simulated_costs()
    cost_files.write(key, quiet)
    cost_files.write(key | {"requests": 8}, quiet._replace(fixed=1.0))  # measured on a busy machine
    (cost_files.folder() / "broken.json").write_text("{")
    name, costs = measured_costs("vllm", "small") or ("", None)
    assert "vllm 1" in name and costs == quiet
    assert measured_costs("sglang", "small") is None and measured_costs("vllm", "large") is None


# ---------------------------------------------------------------------------------------------------------------------
# Recording


def test_trees_of_a_candidate_table() -> None:
    """The tree of the nodes that have children has the same paths as the tree of all candidates."""
    gen, b, k, topk = torch.Generator().manual_seed(0), 3, 3, 2
    table, frontier, offset = new_table(b, k + 2 * topk * k), None, 0
    for level in (1, 2, 3):
        rows = 1 if frontier is None else topk
        logp = torch.rand(b, rows, k, generator=gen).log().sort(-1, descending=True).values
        tokens = torch.randint(1000, (b, rows, k), generator=gen)
        frontier = grow_level(table, offset, level, logp, tokens, frontier, topk if level < 3 else 0)
        offset += rows * k
    roots = torch.tensor([7, 8, 9])
    whole, (small, place) = whole_tree(table, roots), proposing_nodes(table, roots)
    assert whole.tokens.shape == place.shape == (b, 1 + 15) and small.tokens.shape == (b, 1 + 4)

    def path(tree, i: int, node: int) -> list[int]:  # type: ignore[no-untyped-def]
        found = []
        while node >= 0:
            found.append(int(tree.tokens[i, node]))
            node = int(tree.parents[i, node])
        return found

    for i in range(b):
        parents = set(whole.parents[i].tolist()) - {-1}
        assert len(parents) == 5
        for node in range(16):
            assert path(whole, i, node)[-1] == roots[i]
            wanted = path(whole, i, node) if node in parents else [int(roots[i])]
            assert path(small, i, int(place[i, node])) == wanted


def test_the_committed_rounds_are_a_real_heads() -> None:
    """Chances that fall along the depths, and that the path scores estimate."""
    rounds = Rounds.load(node_budgets.SAMPLED_TRACE)
    assert node_budgets.SAMPLED_TRACE.stat().st_size < 300_000 and len(rounds.scores) > 400 and rounds.children == 6
    depths = rounds.depths()
    by_depth = [float(rounds.reach[:, depths == d].sum(1).mean()) for d in range(1, CAPS.steps + 1)]
    assert by_depth == sorted(by_depth, reverse=True) and 0.5 < by_depth[0] < 0.9
    assert (rounds.reach[:, depths == 1].sum(1) <= 1.01).all()
    likely, unlikely = (rounds.reach[(rounds.scores > low) & (rounds.scores <= high)] for low, high in
                        ((-0.3, 0.0), (-5.0, -2.0)))  # fmt: skip
    assert likely.mean() > 0.6 > 0.15 > unlikely.mean()


# ---------------------------------------------------------------------------------------------------------------------
# The command


def test_a_small_run(rounds: Rounds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(node_budgets, "load_rounds", lambda: {"recorded, T = 0": rounds})
    out = tmp_path / "new" / "found.json"
    assert node_budgets.main(["--requests", "4", "--samples", "2", "--rounds", "64", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    (row,) = report["rows"]
    assert row["requests"] == 4 and row["costs"] == "H100, Llama-3.1-8B"
    assert set(row["tokens_per_second"]) == set(row["plans"]) and row["gains"][ORACLE][0] > row["gains"][RAW][0]
    assert [entry["width"] for entry in report["accepted"]] == [2, 3, 4, 6, 8]
    for entry in report["accepted"]:
        assert 1 < entry["tokens"][SAME] <= entry["tokens"][ORACLE]
    shown = capsys.readouterr().out
    assert "SIMULATED" in shown and "start a server" in shown


@pytest.mark.parametrize(("flag", "value"), [("--requests", "0"), ("--samples", "1"), ("--tokens", "1")])
def test_wrong_values_are_refused(flag: str, value: str, capsys) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit):
        node_budgets.parse([flag, value])
    assert f"{flag} is " in capsys.readouterr().err
