"""The policy in a world with known costs and acceptance: it finds the best shape and stays there."""

from __future__ import annotations

import math
import random

import pytest
from policy_world import CAPS, HIGH, LOW, MIDDLE, SURE, World, device, new_policy

from eagle_plugin.core.shape import PLAIN, Levels, Shape
from eagle_plugin.policy import policy as module
from eagle_plugin.policy.costs import CostModel
from eagle_plugin.policy.policy import CATCH_UP_ROUNDS, HYSTERESIS, REVIEW_ROUNDS, Policy
from eagle_plugin.policy.shapes import captured_shapes, shapes_within
from eagle_plugin.runtime.graphs import Buckets

# ---------------------------------------------------------------------------------------------------------------------
# Shapes


@pytest.mark.parametrize(
    "caps", [CAPS, Shape(7, 4, 64), Shape(1, 1, 2), Shape.chain(3), Shape(2, 4, 8), PLAIN], ids=str
)
def test_shapes_within_caps(caps: Shape) -> None:
    shapes = shapes_within(caps)
    assert shapes[0] == PLAIN and caps in shapes and len(set(shapes)) == len(shapes)
    for steps, topk, width in shapes[1:]:
        assert steps <= caps.steps and topk <= caps.topk and width <= caps.width
        assert steps < width  # a path to the last level has room
    assert {Shape.chain(n) for n in range(1, caps.steps + 1) if n < caps.width} <= set(shapes)


@pytest.mark.parametrize("caps", [CAPS, Shape(7, 4, 64), Shape(16, 4, 64), Shape.chain(3), Shape(2, 4, 8)], ids=str)
def test_the_captured_shapes_of_a_parallel_head_are_deep(caps: Shape) -> None:
    """Its levels cost one forward together; widths are those of other heads."""
    shapes, others = captured_shapes(caps, Levels.PARALLEL), captured_shapes(caps)
    assert [shape.width for shape in shapes] == sorted({shape.width for shape in others})
    for shape in shapes[1:]:
        assert shape.steps == min(caps.steps, shape.width - 1) or shape == caps
        assert shape.candidates + 1 >= shape.width or shape == caps
    flat = {shape.width: shape.steps for shape in reversed(others)}
    assert sum(shape.steps for shape in shapes) > sum(flat.values()) or caps.steps <= 4


def test_captured_shapes_hold_the_longest_chain_and_a_bushy_tree() -> None:
    """A chain of all drafted tokens is best where nearly all are accepted, branches where few are."""
    assert captured_shapes(Shape(7, 2, 8))[-2:] == [Shape(4, 2, 8), Shape(7, 2, 8)]
    assert captured_shapes(Shape(7, 4, 16))[-4:] == [Shape(4, 4, 8), Shape(7, 2, 8), Shape(5, 4, 16), Shape(7, 4, 16)]
    assert captured_shapes(Shape(3, 4, 16))[-2:] == [Shape(3, 4, 8), Shape(3, 4, 16)]
    assert captured_shapes(Shape.chain(7)) == [PLAIN, *map(Shape.chain, (1, 2, 3, 7))]
    assert captured_shapes(PLAIN) == [PLAIN]


# ---------------------------------------------------------------------------------------------------------------------
# The choice


@pytest.mark.parametrize("b", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("free_rows", [4, 64, 512])
@pytest.mark.parametrize("accepts", [HIGH, LOW, SURE], ids=["high", "low", "sure"])
def test_the_best_shape_is_found(accepts: tuple[float, ...], free_rows: int, b: int) -> None:
    policy, world = new_policy(device(free_rows)), World(device(free_rows), accepts, noise=0.03)
    world.serve(policy, b, 1000)
    best = world.best(policy.shapes, b)
    assert world.rate(policy.present, b) > world.rate(best, b) * (1 - HYSTERESIS - 0.03)


@pytest.mark.parametrize("b", [1, 8])
@pytest.mark.parametrize("accepts", [HIGH, MIDDLE], ids=["high", "middle"])
def test_a_head_that_drafts_all_levels_at_once_gets_deeper_trees(accepts: tuple[float, ...], b: int) -> None:
    """The same forward of the head costs the same; it drafts one level, or all of them."""
    caps, costs = Shape(8, 1, 9), device(256, level=0.1)
    found = []
    for levels in (Levels.RECURRENT, Levels.PARALLEL, Levels.BLOCK):
        drawn = costs._replace(levels=levels)
        policy, world = new_policy(drawn, caps), World(drawn, accepts)
        world.serve(policy, b, 1500)
        assert world.rate(policy.present, b) > world.rate(world.best(policy.shapes, b), b) * (1 - HYSTERESIS - 0.01)
        found.append(policy.present.steps)
    one_forward_per_level, *one_forward = found
    assert min(one_forward) > one_forward_per_level


@pytest.mark.parametrize(
    ("accepts", "free_rows", "b", "wanted"),
    [(HIGH, 64, 1, "tree"), (SURE, 64, 16, "chain"), (HIGH, 64, 256, "off"), (LOW, 4, 4, "off")],
)
def test_chain_tree_and_off_are_each_best_somewhere(
    accepts: tuple[float, ...], free_rows: int, b: int, wanted: str
) -> None:
    """The control of the test above: its cases have different answers, and a wrong one costs."""
    policy, world = new_policy(device(free_rows)), World(device(free_rows), accepts)
    world.serve(policy, b, 1000)
    kinds = {shape: "off" if shape == PLAIN else "chain" if shape.topk == 1 else "tree" for shape in policy.shapes}
    assert kinds[policy.present] == wanted == kinds[world.best(policy.shapes, b)]
    others = [shape for shape in policy.shapes if kinds[shape] != wanted]
    assert world.rate(policy.present, b) > 1.02 * max(world.rate(shape, b) for shape in others)


def test_requests_without_drafts_yield_one_token() -> None:
    """They cost as much as those with drafts: where few have some, none pay."""
    policy, world = new_policy(device(32)), World(device(32), HIGH)
    world.serve(policy, 24, 500)
    expected, seconds = policy.survival.expected(), policy.costs.seconds(policy.shapes, 24, 0)
    for drafting in (24, 8, 1):
        for shape, rate in policy.rates(24, 0, drafting=drafting).items():
            assert rate == pytest.approx((24 + drafting * expected[shape]) / seconds[shape])
    chosen = []
    for drafting in (24, 12, 1, 24):
        assert policy.is_due(24, None, drafting) or not chosen  # at once
        policy.choose(24, 0, drafting=drafting)
        assert not policy.is_due(24, None, drafting)
        chosen.append(policy.present)
    assert chosen == [Shape.chain(1), PLAIN, PLAIN, Shape.chain(1)]


def test_long_prefixes_count() -> None:
    """The target's time is then that of its keys, so that drafted rows are nearly free."""
    policy, world = new_policy(device(64)), World(device(64), HIGH)
    world.serve(policy, 64, 1000)
    short = policy.present
    world.serve(policy, 64, 1000, keys=64 * 1_000_000)
    assert policy.present.width > short.width
    assert world.rate(policy.present, 64, 64_000_000) > 0.95 * world.rate(
        world.best(policy.shapes, 64, 64_000_000), 64, 64_000_000
    )


def test_the_first_rounds_draft_all_so_that_the_first_sums_are_those_of_all_shapes() -> None:
    policy = new_policy(device(4))
    assert [policy.choose(64, 0) for _ in range(5)] == [CAPS] * 5
    assert policy.choose(64, 0, [PLAIN]) == PLAIN
    assert policy.choose(64, 0) == CAPS
    World(device(4), LOW).serve(policy, 64, 20)
    assert policy.present == PLAIN


@pytest.mark.parametrize(("prompt", "drafts"), [(0, True), (16, True), (512, False)])
def test_prompts_that_the_head_reads_count_against_drafts(prompt: int, drafts: bool) -> None:
    """A head that takes 0.01 of a plain round per prompt token: with many prompt tokens per answer it is left off."""
    costs = device(64)._replace(prompt_token=0.01)
    policy, world = new_policy(costs), World(costs, HIGH)
    world.serve(policy, 16, 200)
    for _ in range(2000):
        policy.observe_tokens(prompt, 16)
    world.serve(policy, 16, 200)
    assert (policy.present != PLAIN) == drafts
    assert policy.reading() == pytest.approx(0.01 * prompt / 16 * math.exp(policy.costs.speed), rel=0.01)
    # By enumeration: of two answers, one drafted and one plain, the faster one with its share of the prompts.
    rates, tokens = policy.rates(16, 0), policy.survival.expected()
    for shape, seconds in policy.costs.seconds(policy.shapes, 16, 0).items():
        yielded = 16 * (1 + tokens[shape])
        share = 0 if shape == PLAIN else yielded * policy.reading()
        assert rates[shape] == pytest.approx(yielded / (seconds + share))


@pytest.mark.parametrize(("deferred", "drafts"), [(0, True), (4, True), (100_000, False)])
def test_what_the_head_has_to_read_first_counts_against_leaving_plain_decoding(deferred: int, drafts: bool) -> None:
    policy, world = new_policy(device(64)), World(device(64), HIGH)
    world.serve(policy, 16, 200)
    assert policy.present != PLAIN
    policy.present = PLAIN  # as after a time of low acceptance
    for _ in range(2 * REVIEW_ROUNDS):
        policy.choose(16, 0, None, deferred)
    assert (policy.present != PLAIN) == drafts
    # By enumeration: the tokens of so many plain rounds' time, part of which goes to reading.
    rates, seconds = policy.rates(16, 0), policy.costs.seconds((PLAIN,), 16, 0)[PLAIN]
    time, reading = CATCH_UP_ROUNDS * seconds, policy.costs.catch_up(16, 0, deferred)
    drafted = max(rates.values()) * time
    assert (drafted > rates[PLAIN] * (1 + HYSTERESIS) * (time + reading)) == drafts


def test_prompts_are_averaged_over_many_answers() -> None:
    """One long prompt is not a load of long prompts; a load of them is known after some thousand tokens."""
    policy = new_policy(device(64)._replace(prompt_token=1.0))
    policy.observe_tokens(2000, 1)
    assert policy.reading() < 4
    for _ in range(3000):
        policy.observe_tokens(0, 1)
    assert policy.reading() < 0.5
    for _ in range(40):  # answers of 500 tokens after 2,000 of the prompt
        policy.observe_tokens(2000, 0)
        for _ in range(500):
            policy.observe_tokens(0, 1)
    assert policy.reading() == pytest.approx(4, rel=0.1)


def test_allowed_shapes() -> None:
    allowed = frozenset({PLAIN, Shape.chain(2), Shape(1, 4, 6)})
    policy, world = new_policy(device(64)), World(device(64), HIGH)
    world.serve(policy, 1, 200)
    free = policy.present
    assert free not in allowed
    assert {policy.choose(1, 0, allowed) for _ in range(500)} <= allowed
    assert policy.present == world.best(sorted(allowed), 1)
    policy.choose(1, 0)
    assert policy.present == free  # at once
    assert {policy.choose(1, 0, frozenset({PLAIN})) for _ in range(500)} == {PLAIN}
    with_caps = frozenset({PLAIN, CAPS})
    assert {policy.choose(1, 0, with_caps) for _ in range(50)} == {CAPS}


def test_two_policies_that_see_the_same_choose_alike() -> None:
    """As the ranks of tensor parallelism must."""
    policies = [new_policy(device(64)) for _ in range(2)]
    other = new_policy(device(64))
    chosen: list[list[Shape]] = [[], []]
    for policy, shapes in zip([*policies, other], [*chosen, others := []], strict=True):  # type: ignore[misc]
        world, gen = World(device(64), HIGH, seed=policy is other, noise=0.2), random.Random(0)
        for _ in range(200):
            world.accepts = gen.choice((HIGH, LOW))
            shapes += world.serve(policy, gen.randint(1, 200), gen.randint(1, 30))
    assert chosen[0] == chosen[1] and len(set(chosen[0])) > 5
    assert others != chosen[0]


# ---------------------------------------------------------------------------------------------------------------------
# Hysteresis


NEARLY_EQUAL = [(1, 64), (8, 64), (32, 256)]  # (requests, free rows) at which two shapes are nearly as good


def flips(b: int, free_rows: int) -> int:
    """How often the present shape changes in 4,000 rounds; times have 10 % noise, tokens are accepted by chance."""
    policy, world = new_policy(device(free_rows)), World(device(free_rows), MIDDLE, noise=0.1)
    world.serve(policy, b, 500)
    presents = []
    for _ in range(500):
        world.serve(policy, b, 8)
        presents.append(policy.present)
    return sum(x != y for x, y in zip(presents, presents[1:], strict=False))


def test_noise_does_not_make_it_flip(monkeypatch: pytest.MonkeyPatch) -> None:
    calm = [flips(*case) for case in NEARLY_EQUAL]
    assert max(calm) <= 30
    monkeypatch.setattr(module, "HYSTERESIS", 0.0)  # the control
    assert sum(flips(*case) for case in NEARLY_EQUAL) > 2 * sum(calm)


def test_where_no_scores_are_known_what_was_accepted_is_enough() -> None:
    """As where some prompt is always being read: trees whose drafts are never accepted are left."""
    policy = new_policy(device(64))
    chosen = []
    for _ in range(200):
        chosen.append(policy.choose(8, 0))
        if chosen[-1] != PLAIN:
            policy.observe_accepted(chosen[-1], 8, [0] * chosen[-1].steps)
    assert chosen[0] == CAPS and policy.present == PLAIN


# ---------------------------------------------------------------------------------------------------------------------
# Padded batches


def test_the_choice_for_a_padded_batch_is_that_of_its_size() -> None:
    """A round of 17 requests runs as one of 64: it yields 17 / 64 of the tokens, whatever the shape."""
    buckets = Buckets([1, 4, 16, 64])

    def padded(b: int, shape: Shape) -> int:
        return buckets.of(b) or b

    models = [CostModel(device(64)), CostModel(device(64), padded)]
    found = []
    for model in models:
        policy, world = Policy(CAPS, model), World(device(64), HIGH)
        world.serve(policy, 64, 40)
        found.append([policy.rates(b, 64_000) for b in (17, 64)])
        assert sum(model.phases(CAPS, 17, 64_000).values()) == pytest.approx(model.seconds([CAPS], 17, 64_000)[CAPS])
    unpadded, (few, many) = found
    best = [max(rates, key=rates.__getitem__) for rates in (few, many, unpadded[0])]
    assert best[0] == best[1] != best[2]
    assert few[PLAIN] / many[PLAIN] == pytest.approx(few[CAPS] / many[CAPS]) == pytest.approx(17 / 64)
