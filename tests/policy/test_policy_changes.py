"""The policy in a world that changes: acceptance and batch size; and what its probes cost."""

from __future__ import annotations

import math

import pytest
from covering import half
from policy_world import CAPS, HIGH, LOW, MIDDLE, SURE, World, compare_nothing, device, new_policy, tree_sums

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy import corrections
from eagle_plugin.policy import policy as module
from eagle_plugin.policy.policy import Policy

# ---------------------------------------------------------------------------------------------------------------------
# Changes of the acceptance

# Rounds until a fall and a rise are followed, by batch size. With one request, the sums wrong and the drafts off it may
# take 1,500 rounds to come back, and takes 280 in the median: a probe tells of one token or none, and probes may cost a
# hundredth of the time.
NONE = (0.05, 0.02, 0.01, 0.01)  # hardly any draft is accepted
FOLLOWED = {1: (125, 1500), 32: (25, 100)}


@pytest.mark.parametrize(("free_rows", "b", "follows", "late"), half((1.5, 8), (1, 32), (False, True), (0, 2)))
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 8), marks=pytest.mark.matrix)])
def test_acceptance_that_falls_and_rises_is_followed(
    free_rows: float, b: int, follows: bool, late: int, seeds: range
) -> None:
    """free_rows are per request, so that the best shapes are the same at both batch sizes: off or shallow when low.

    follows: whether the sums of the head's estimates follow; late: rounds that are scheduled ahead.
    """
    for seed in seeds:
        costs = device(free_rows * b, level=0.1)
        policy, world = new_policy(costs), World(costs, HIGH, seed=seed, noise=0.03, late=late)
        world.serve(policy, b, 600)
        high = policy.present
        for accepts, most in zip((LOW, HIGH), FOLLOWED[b], strict=True):
            world.accepts = accepts
            world.predicts = accepts if follows else HIGH
            assert world.rounds_until_good(policy, b, 5000) <= most
            world.serve(policy, b, 1000)
            assert world.rate(policy.present, b) >= 0.9 * world.rate(world.best(policy.shapes, b), b)
            if accepts == LOW:
                assert policy.present.steps < high.steps and (policy.present == PLAIN) == (free_rows == 1.5)


@pytest.mark.parametrize("follows", [False, True])
def test_after_a_burst_a_single_request_is_followed_as_ever(follows: bool) -> None:
    """64 -> 1 requests, whose drafts are hardly accepted: what the burst taught does not outweigh them."""
    for seed in range(3):
        costs = device(512, level=0.2)
        policy, world = new_policy(costs), World(costs, HIGH, seed=seed, noise=0.03)
        world.serve(policy, 64, 600)
        assert policy.present != PLAIN
        world.accepts = LOW
        world.predicts = LOW if follows else HIGH
        policy.choose(1, 0)  # the shape for the new load
        assert world.rate(policy.present, 1) < 0.9 * world.rate(world.best(policy.shapes, 1), 1)
        assert world.rounds_until_good(policy, 1, 1000) <= FOLLOWED[1][0]


def test_without_probes_it_never_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(module, "PROBE_COST", 0.0)
    monkeypatch.setattr(module, "PROBE_ROUNDS", math.inf)
    monkeypatch.setattr(Policy, "_most_telling", lambda self, rates: self.present)
    costs = device(48)
    policy, world = new_policy(costs), World(costs, HIGH)
    world.serve(policy, 32, 600)
    assert policy.present != PLAIN
    world.accepts = LOW
    world.serve(policy, 32, 600)
    assert policy.present == PLAIN
    world.accepts = HIGH
    assert set(world.serve(policy, 32, 5000)) == {PLAIN}


@pytest.mark.parametrize("late", [0, 2])
def test_load_that_rises_and_falls_is_followed(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 -> 64 -> 1 requests: as soon as a choice takes effect, the shape is one for the new load."""
    compare_nothing(monkeypatch)
    policy, world = new_policy(device(64)), World(device(64), HIGH, late=late)
    for b in (1, 64, 1, 256, 1):
        served = world.serve(policy, b, 30)
        wanted = 0.95 * world.rate(world.best(policy.shapes, b), b)
        assert world.rate(served[late], b) >= wanted
        assert late == 0 or b == 1 or world.rate(served[0], b) < wanted  # the shape of the load before


def test_when_the_batch_shrinks_it_drafts_at_once() -> None:
    policy, world = new_policy(device(64)), World(device(64), HIGH)
    world.serve(policy, 256, 500)
    assert policy.present == PLAIN
    assert policy.choose(2, 0) != PLAIN
    assert world.rate(policy.present, 2) > 0.95 * world.rate(world.best(policy.shapes, 2), 2)
    assert policy.choose(256, 0) == PLAIN


def test_a_batch_that_shrinks_by_one_request_at_a_time_is_reviewed_too() -> None:
    policy, world = new_policy(device(64)), World(device(64), HIGH)
    world.serve(policy, 256, 500)
    for b in range(256, 0, -1):
        world.serve(policy, b, 1)
    assert world.rate(policy.present, 1) > 0.95 * world.rate(world.best(policy.shapes, 1), 1)


# ---------------------------------------------------------------------------------------------------------------------
# Probes


@pytest.mark.parametrize(
    ("free_rows", "accepts", "b", "compares"), half((1.5, 4, 100), (HIGH, LOW, NONE), (1, 32), (False, True))
)
def test_probes_cost_a_hundredth_of_the_time(
    monkeypatch: pytest.MonkeyPatch, free_rows: float, accepts: tuple[float, ...], b: int, compares: bool
) -> None:
    """By the true rates: what is lost against the present shape, in rounds that do not have it.

    Rounds that are served to compare costs come on top.
    """
    if not compares:
        compare_nothing(monkeypatch)
    costs = device(free_rows * b)
    policy, world = new_policy(costs), World(costs, accepts)
    world.serve(policy, b, 1000)
    lost = total = 0.0
    others = 0
    for _ in range(4000):
        (shape,) = world.serve(policy, b, 1)
        seconds = costs.round(shape, b, 0)
        total += seconds
        if shape != policy.present:
            others += 1
            lost += seconds * (1 - world.rate(shape, b) / world.rate(policy.present, b))
    assert lost / total < (0.02 if compares else 0.0125)
    if not compares:
        assert (others == 0) if policy.present[:2] == CAPS[:2] else (others >= 10)


@pytest.mark.parametrize(
    ("slower", "free_rows", "accepts", "most"),
    [(1.5, 1.5, LOW, 0.02), (1.5, 4, LOW, 0.02), (3, 1.5, LOW, 0.04), (3, 4, LOW, 0.04), (3, 4, HIGH, 0.04)],
)
def test_what_is_lost_where_drafts_take_longer_than_their_tables_say(
    slower: float, free_rows: float, accepts: tuple[float, ...], most: float
) -> None:
    """Plain rounds are best. What was learned of a table fades, so that probes and comparisons cost several times what
    is planned for them."""
    lost, present = lost_to_slow_drafts(slower, free_rows, accepts)
    assert present == PLAIN
    assert 0.005 < lost < most


def test_what_is_always_far_off_is_not_taken_for_a_disturbance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that are off by a factor of six; without this, half of the time is lost."""
    assert lost_to_slow_drafts(6, 4, HIGH)[0] < 0.12
    monkeypatch.setattr(corrections, "LASTING", math.inf)
    assert lost_to_slow_drafts(6, 4, HIGH)[0] > 0.4


@pytest.mark.parametrize(("free_rows", "b"), [(64, 1), (512, 8)])
def test_slow_phases_of_the_machine_are_no_errors_of_a_shape(free_rows: float, b: int) -> None:
    """Ten of 200 rounds take three times as long, whatever their shape: the best one is kept."""
    lost = []
    for seed in range(3):
        costs = device(free_rows)
        slower = lambda shape, n: 3.0 if n % 200 < 10 else 1.0  # noqa: E731
        policy, world = new_policy(costs), World(costs, HIGH, seed=seed, noise=0.05, slower=slower)
        world.serve(policy, b, 300)
        best, seconds, tokens, could = world.best(policy.shapes, b), 0.0, 0.0, 0.0
        for _ in range(800):
            before, n = world.seconds, world.rounds
            (shape,) = world.serve(policy, b, 1)
            took = costs.round(shape, b, 0) * slower(shape, n)
            seconds, tokens = seconds + world.seconds - before, tokens + world.rate(shape, b) * took
            could += world.rate(best, b) * took
        lost.append(1 - tokens / could)
    assert sum(lost) / len(lost) < 0.025


def lost_to_slow_drafts(
    slower: float, free_rows: float, accepts: tuple[float, ...], b: int = 32
) -> tuple[float, Shape]:
    """The share of the time lost against the best shape where drafted rounds take so many times what the tables say,
    after 1,000 rounds; and the present shape in the end."""
    costs = device(free_rows * b)
    policy, world = new_policy(costs), World(costs, accepts, slower=lambda shape, _: 1.0 if shape == PLAIN else slower)
    world.serve(policy, b, 1000)
    best = world.rate(world.best(policy.shapes, b), b)
    before, tokens = world.seconds, 0.0
    for _ in range(4000):
        (shape,) = world.serve(policy, b, 1)
        tokens += world.rate(shape, b) * costs.round(shape, b, 0) * world.slower(shape, 0)
    return 1 - tokens / (best * (world.seconds - before)), policy.present


@pytest.mark.parametrize("charged", [True, False])
def test_probes_pay_for_what_the_head_reads_before_them(charged: bool) -> None:
    """Requests of 24 tokens decode plainly: before a probe the head reads what they have. Uncharged is the control."""
    costs, b = device(48), 32
    policy, world = new_policy(costs), World(costs, LOW)
    world.serve(policy, b, 1000)
    assert policy.present == PLAIN
    lost = total = 0.0
    deferred = probes = 0
    for _ in range(6000):
        shape = policy.choose(b, 0, deferred=deferred if charged else 0)
        seconds = costs.round(shape, b, 0)
        total += seconds
        if shape == PLAIN:
            deferred = min(deferred + 1, 24)
            continue
        probes, total = probes + 1, total + policy.costs.catch_up(b, 0, deferred)
        lost += seconds * (1 - world.rate(shape, b) / world.rate(PLAIN, b)) + policy.costs.catch_up(b, 0, deferred)
        deferred = 0
        chances = tree_sums(shape, LOW)
        policy.observe_accepted(shape, b, [round(b * chance) for chance in chances])
    assert probes >= 10
    assert lost / total < 0.0125 if charged else lost / total > 0.0175


@pytest.mark.parametrize("counted", [True, False])
def test_a_long_plain_load_counts_what_the_head_reads_of_it(counted: bool) -> None:
    """The head reads what it missed whenever that is 10 tokens per request; uncounted, plain seems best."""
    costs, b, most = device(48, level=0.2), 32, 10
    policy, world = new_policy(costs), World(costs, MIDDLE)
    drafted = max(world.rate(shape, b) for shape in policy.shapes if shape != PLAIN)
    plainly = b / (costs.round(PLAIN, b, 0) + policy.costs.catch_up(b, 0, most) / most)
    assert 1.05 * plainly < drafted < 0.95 * world.rate(PLAIN, b)
    if counted:
        policy.costs.most_deferred = most
    world.serve(policy, b, 1500)
    assert (policy.present == PLAIN) != counted


def test_probes_of_deep_trees_are_the_cheapest_that_tell() -> None:
    """A chain is best; the probes are trees of the caps' depth and children, but not of their width."""
    policy, world = new_policy(device(64), Shape(4, 4, 64)), World(device(64), SURE)
    world.serve(policy, 16, 500)
    chosen = world.serve(policy, 16, 5000)
    probes = {shape for shape in chosen if shape.topk > 1}
    assert policy.present.topk == 1 and probes
    assert all(shape[:2] == (4, 4) and shape.width < 16 for shape in probes)


def test_a_probe_that_pays_brings_the_next_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single rounds; those that are served in a row to compare are no probes."""
    compare_nothing(monkeypatch)
    costs = device(48)
    policy, world = new_policy(costs), World(costs, LOW)
    world.serve(policy, 32, 1000)
    assert policy.present == PLAIN

    def gap(accepted: int) -> int:
        """Rounds from one probe to the next, if the first has so many accepted tokens."""
        while (shape := policy.choose(32, 0)) == PLAIN:
            pass
        policy.observe_accepted(shape, 32, [accepted, *[0] * (shape.steps - 1)])
        n = 1
        while policy.choose(32, 0) == PLAIN:
            n += 1
        return n

    usual = round(32 * policy.survival.expected()[Shape(1, 1, 2)])
    assert gap(32) < 3
    policy = new_policy(costs)
    World(costs, LOW).serve(policy, 32, 1000)
    assert 20 < gap(usual) < 50
    assert gap(0) > 25
