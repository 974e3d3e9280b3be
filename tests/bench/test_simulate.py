"""The simulator: its arithmetic, its traces, its rounds, and one small run."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks import simulate
from benchmarks.roofline import B200, H100, H200
from benchmarks.simulate_rounds import Requests, accept_length, fixed_rate, serve_policy
from benchmarks.simulate_targets import MEMORY_EFFICIENCY, TABLE_ROWS, TARGETS, Experts, Machine
from benchmarks.simulate_traces import CAPS, MISSED, Outcomes, Trace, calibrate, synthesize
from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.shapes import shapes_within

SHAPES = shapes_within(CAPS)
LLAMA, GPT = TARGETS["Llama-3.1-8B"], TARGETS["GPT-OSS-120B"]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthesize(1.5, responses=8, length=60)


@pytest.fixture(scope="module")
def outcomes(trace: Trace) -> Outcomes:
    return Outcomes.of(trace, SHAPES)


# ---------------------------------------------------------------------------------------------------------------------
# Times


def test_experts_that_rows_touch() -> None:
    """Against draws of k different experts per row."""
    experts, gen = Experts(32, 4, 1, 2), random.Random(0)
    for rows in (1, 3, 16):
        draws = [len({e for _ in range(rows) for e in gen.sample(range(32), 4)}) for _ in range(2000)]
        assert experts.touched(rows) == pytest.approx(sum(draws) / len(draws), rel=0.02)
    assert experts.touched(1) == pytest.approx(4) and experts.touched(10_000) == pytest.approx(32)


def test_parameters_of_the_targets() -> None:
    """The published sizes, in billions, without the embedding."""
    wanted = {"Llama-3.1-8B": 7.5, "Llama-3.3-70B": 69.5, "Qwen3-Coder-30B-A3B": 30.2, "GPT-OSS-120B": 116.2}
    for name, billions in wanted.items():
        target = TARGETS[name]
        experts = target.decoder.layers * target.expert_weights() * (target.experts.count if target.experts else 0)
        assert (target.shared_weights() + experts) / 1e9 == pytest.approx(billions, rel=0.02), name


def test_one_row_is_bound_by_memory_and_many_by_compute() -> None:
    machine = Machine(H100, LLAMA._replace(gap=0.0), 0.0)
    weights = LLAMA.shared_weights()
    assert machine.target_seconds(1) == pytest.approx(2 * weights / (3.35e12 * MEMORY_EFFICIENCY), rel=1e-3)
    assert machine.target_seconds(16) < 1.02 * machine.target_seconds(1)
    assert machine.target_seconds(8192) == pytest.approx(8192 * 2 * weights / (989e12 * 0.6), rel=0.06)
    assert Machine(H200, LLAMA, 0.0).target_seconds(1) < machine.target_seconds(1) + 32 * LLAMA.gap
    assert Machine(B200, LLAMA, 0.0).target_seconds(4096) < Machine(H200, LLAMA, 0.0).target_seconds(4096)


def test_more_rows_of_a_mixture_of_experts_read_more() -> None:
    dense, moe = (Machine(H100, target, 0.0) for target in (LLAMA, GPT))
    assert moe.target_seconds(8) > 1.3 * moe.target_seconds(1)
    assert dense.target_seconds(8) < 1.01 * dense.target_seconds(1)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("b", [1, 64])
def test_the_policys_tables_agree_with_the_true_times(target, b: int) -> None:  # type: ignore[no-untyped-def]
    """Exactly where they were measured, and nearly between."""
    machine = Machine(H100, target, 1e-4)
    costs = machine.costs()
    for shape in SHAPES:
        rows = {b * shape.width, b * shape.topk, b * shape.max_accept_length}
        tolerance = 1e-9 if rows <= set(TABLE_ROWS) else 0.05
        assert costs.round(shape, b, 1000 * b) == pytest.approx(machine.seconds(shape, b, 1000 * b), rel=tolerance)


def test_a_parallel_head_takes_one_forward_whatever_the_depth() -> None:
    machine = Machine(H100, LLAMA, 0.0)
    parallel = machine._replace(is_parallel=True)
    levels = [machine.seconds(Shape.chain(n), 1, 0) - parallel.seconds(Shape.chain(n), 1, 0) for n in (1, 2, 7)]
    assert levels[0] == 0
    assert levels[2] == pytest.approx(6 * levels[1], rel=0.05)


# ---------------------------------------------------------------------------------------------------------------------
# Traces


def test_accepted_tokens_are_those_of_a_walk(trace: Trace, outcomes: Outcomes) -> None:
    """Of the largest tree: its best 63 candidates, as far as the target's path goes."""
    largest = outcomes.shapes.index(CAPS)
    for t in range(0, len(trace.scores), 37):
        best = set(np.argsort(-trace.scores[t], kind="stable")[: CAPS.width - 1].tolist())
        walked = 0
        while walked < CAPS.steps and trace.path[t, walked] != MISSED and int(trace.path[t, walked]) in best:
            walked += 1
        assert outcomes.accepted[t, largest] == walked
        chain = outcomes.shapes.index(Shape.chain(3))
        assert outcomes.accepted[t, chain] <= min(walked, 3)
        first_child = int(np.argmax(trace.scores[t, : CAPS.topk]))
        assert (outcomes.accepted[t, chain] > 0) == (trace.path[t, 0] == first_child)
    assert (outcomes.accepted[:, outcomes.shapes.index(PLAIN)] == 0).all()


def test_a_synthetic_head_is_calibrated(trace: Trace, outcomes: Outcomes) -> None:
    """The sums of path scores are what is accepted, for every shape, within three standard errors."""
    for j, shape in enumerate(outcomes.shapes):
        error = outcomes.accepted[:, j].std() / len(trace.scores) ** 0.5
        difference = outcomes.accepted[:, j].mean() - outcomes.sums[:, j].sum(-1).mean()
        # A small tree counts the nodes of a larger one's levels, whose parents it may not have.
        assert -3 * error - 0.12 < difference <= 3 * error + 1e-6, str(shape)


def test_calibration() -> None:
    found = synthesize(calibrate(Shape.chain(3), 2.5), responses=40, seed=1).accepted(Shape.chain(3))
    assert 1 + found == pytest.approx(2.5, abs=0.08)


def test_a_trace_is_written_and_read(trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "new" / "trace.npz")
    again = Trace.load(tmp_path / "new" / "trace.npz")
    assert np.abs(again.scores - trace.scores).max() < 0.02
    assert (again.path == trace.path).all() and (again.starts == trace.starts).all()


def test_the_committed_trace_is_a_real_heads() -> None:
    """The accept lengths of docs/heads.md, and candidates whose scores fall along a path."""
    trace = Trace.load(simulate.TRACE)
    assert simulate.TRACE.stat().st_size < 200_000 and len(trace.scores) > 500
    outcomes = Outcomes.of(trace, [Shape.chain(1), Shape.chain(3), Shape(2, 4, 8), Shape(4, 4, 16)])
    lengths = [accept_length(outcomes, shape) for shape in outcomes.shapes]
    assert lengths == sorted(lengths) and 1.3 < lengths[0] < 1.7 and 2.2 < lengths[3] < 2.9
    taken = np.take_along_axis(trace.scores, np.minimum(trace.path, trace.scores.shape[1] - 1).astype(int), 1)
    both = (trace.path[:, 1:] != MISSED) & (trace.path[:, :-1] != MISSED)
    assert both.any() and (taken[:, 1:] <= taken[:, :-1] + 1 / 16)[both].all()
    missed = trace.path == MISSED
    assert (missed[:, 1:] >= missed[:, :-1]).all()


def test_requests_walk_through_their_responses(outcomes: Outcomes) -> None:
    requests = Requests(outcomes, 50, np.random.default_rng(0))
    for _ in range(100):
        before, responses = requests.at.copy(), requests.responses.copy()
        requests.advance(np.full(50, 3))
        stayed = requests.responses == responses
        same = stayed & (requests.at == before + 3)
        assert (same | (requests.at == outcomes.starts[requests.responses])).all()
        assert (requests.at < outcomes.starts[requests.responses + 1]).all()


# ---------------------------------------------------------------------------------------------------------------------
# Rounds


@pytest.mark.parametrize("b", [1, 16, 256])
def test_the_policy_is_as_fast_as_the_best_fixed_shape(outcomes: Outcomes, b: int) -> None:
    machine = Machine(H100, LLAMA, 1e-4)
    served = serve_policy(machine, outcomes, CAPS, b, 1000, 200, max(200, 3000 // b))
    best = max(fixed_rate(machine, accept_length(outcomes, s), s, b, 1000) for s in outcomes.shapes)
    assert served.rate > 0.93 * best
    wrong = fixed_rate(machine, accept_length(outcomes, CAPS), CAPS, b, 1000)
    assert b == 1 or wrong < 0.8 * best  # the control: the caps are not the answer


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "out" / "simulate.json"
    few = ["--devices", "H100", "--targets", "Llama-3.1-8B", "--requests", "4", "64", "--rounds", "20"]
    assert simulate.main([*few, "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(report.read_text())
    assert found["is_simulated"] is True
    assert [row["requests"] for row in found["rows"]] == [4, 64, 4, 64]
    assert {row["acceptance"] for row in found["rows"]} == {"synthetic", simulate.RECORDED}
    assert set(found["rows"][0]["speed_ups"]) == {"policy", *simulate.STATIC, simulate.PARALLEL}
    assert "SIMULATED" in printed


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.npz").write_text("nothing")
    with pytest.raises(UserError, match="is no trace of this program .* record one with --record"):
        simulate.load_trace(tmp_path / "trace.npz")


def test_arguments_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--requests", "0"], "--requests is [0], wanted at least 1"),
        (["--tokens", "7"], "--tokens is 7, wanted more than 7"),
    ):
        with pytest.raises(SystemExit):
            simulate.parse(arguments)
        assert message in capsys.readouterr().err
