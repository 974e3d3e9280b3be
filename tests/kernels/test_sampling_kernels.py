"""The sampling kernels against the oracles: ties and infinities, the drawn children, the random numbers."""

from __future__ import annotations

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import ancestor_bitmasks, prop, random_params, random_parents
from torch import Tensor

from eagle_plugin.core import propose as proposing
from eagle_plugin.core import rng
from eagle_plugin.core import verify as verifying
from eagle_plugin.core.propose import NUM_SAMPLED
from eagle_plugin.core.sampling import Filters, SamplingParams, target_distribution
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.kernels import sampling
from eagle_plugin.kernels.sampling import Proposals

weights = st.floats(0.01, 1)
seeds = st.integers(0, 2**31)
meanings = pytest.mark.parametrize("filters", ["joint", "chained"])


def roots(b: int) -> tuple[DraftTree, Proposals]:
    """Trees of the root alone, whose bonus token is a plain draw."""
    none = torch.full((b, 1), -1, dtype=torch.int32)
    one = torch.ones(b, 1, dtype=torch.int64)
    proposals = Proposals(torch.zeros(b, 0, 0, dtype=torch.int64), torch.zeros(b, 0, 0))
    return DraftTree(one, none, none + 1, one, none), proposals


def draw(logits: Tensor, params: SamplingParams, u: Tensor, filters: Filters = "joint") -> Tensor:
    """One token per row at the fractions u [b] of its distribution."""
    tree, proposals = roots(len(logits))
    return sampling.verify_tree(tree, logits, params, proposals, u[:, None, None], 1, filters=filters).tokens[:, 0]


@meanings
@prop
@given(seed=seeds, b=st.integers(1, 6), vocab=st.sampled_from([1, 2, 7, 63, 64, 65, 300, 5000]), coarse=st.booleans())
def test_draws_are_where_the_oracle_puts_them(filters: Filters, seed: int, b: int, vocab: int, coarse: bool) -> None:
    gen = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(b, vocab, generator=gen)
    if coarse:
        logits = logits.round()  # many equals, so that top-k and top-p cut between them
        logits[torch.rand(b, vocab, generator=gen) < 0.1] = -torch.inf
    params, u = random_params(b, vocab, gen), torch.rand(b, generator=gen, dtype=torch.float64)
    p = target_distribution(logits, params, filters)
    token = draw(logits, params, u, filters)[:, None]
    above = p.cumsum(dim=1).gather(1, token)[:, 0]
    below = above - p.gather(1, token)[:, 0]
    slack = 3e-6  # float32 exponentials against float64
    # a token at the very edge of a filter may be in one and out of the other: then the masses differ by its mass
    exact = (below - slack <= u) & (u <= above + slack)
    if not bool(exact.all()):
        edge = p.where(p > 0, 2.0).amin(dim=1)
        assert bool(((below - edge - slack <= u) & (u <= above + edge + slack))[~exact].all())
    assert bool((p.gather(1, token) > 0).all()) or not bool(exact.all())


@meanings
def test_the_kept_tokens_are_the_oracles(filters: Filters) -> None:
    """Which tokens can come out at all, over a fine grid of u: ties at the cut go to the lower ids."""
    gen = torch.Generator().manual_seed(1)
    n, vocab = 4000, 24
    for _ in range(20):
        logits, params = (2 * torch.randn(1, vocab, generator=gen)).round(), random_params(1, vocab, gen)
        grid = torch.linspace(0, 1 - 1e-9, n, dtype=torch.float64)
        rows = params.for_rows(n)
        seen = set(draw(logits.expand(n, vocab).contiguous(), rows, grid, filters).tolist())
        p = target_distribution(logits, params, filters)[0]
        assert seen >= set((p > 2 / n).nonzero()[:, 0].tolist())
        assert seen <= set((p > 0).nonzero()[:, 0].tolist())


def test_a_token_with_exactly_top_p_before_it() -> None:
    u = torch.linspace(0, 1 - 1e-9, 100, dtype=torch.float64)
    params = SamplingParams.of(100, top_p=0.5)
    kept = [set(draw(torch.zeros(100, 4), params, u, filters).tolist()) for filters in ("joint", "chained")]
    assert kept == [{0, 1, 2}, {0, 1}]


@meanings
def test_infinite_and_missing_logits(filters: Filters) -> None:
    inf, nan = torch.inf, torch.nan
    rows = [[0.0, inf, 1.0, -inf], [nan, 2.0, nan, -inf], [-inf, -inf, -inf, 0.0], [inf, 0.0, inf, 0.0]]
    logits = torch.tensor(rows).repeat_interleave(400, dim=0)
    u = torch.linspace(0, 1 - 1e-9, 400, dtype=torch.float64).repeat(4)
    n = len(u)
    params = SamplingParams.of(n, top_p=0.99)
    tokens = draw(logits, params, u, filters).view(4, 400)
    assert [sorted(set(row.tolist())) for row in tokens] == [[1], [1], [3], [0, 2]]
    greedy = params._replace(top_ks=torch.ones(n).int())
    assert draw(logits, greedy, u, filters).view(4, 400)[:, 0].tolist() == [1, 1, 3, 0]
    nothing = torch.full((n, 3), -inf)  # a mask that allows nothing: any token, but a token
    assert set(draw(nothing, params._replace(top_ps=torch.ones(n)), u, filters).tolist()) == {0, 1, 2}


@meanings
@prop
@given(
    seed=seeds,
    b=st.integers(1, 4),
    width=st.integers(1, 40),
    vocab=st.sampled_from([5, 70, 600]),
    num_uniforms=st.integers(1, 5),
)
def test_walks_are_the_oracles(filters: Filters, seed: int, b: int, width: int, vocab: int, num_uniforms: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    parents = random_parents(b, width, gen)
    rows, top_m = 4, 5
    draws = torch.full((b, width), -1, dtype=torch.int32)
    tokens = torch.randint(0, min(vocab, 6), (b, width), generator=gen)
    q = torch.rand(b, rows, top_m, generator=gen)
    q_tokens = torch.rand(b, rows, vocab, generator=gen).argsort(dim=2)[:, :, :top_m].sort(dim=2).values
    for i in range(b):
        drawn: dict[int, tuple[int, list[int]]] = {}  # parent -> its proposal row, and what is not drawn yet
        for node in range(1, width):
            parent = int(parents[i, node])
            if parent < 0 or float(torch.rand((), generator=gen)) < 0.5:
                continue
            fresh = (int(torch.randint(0, rows, (), generator=gen)), torch.randperm(top_m, generator=gen).tolist())
            row, order = drawn.setdefault(parent, fresh)
            if order:
                draws[i, node], tokens[i, node] = row, q_tokens[i, row, order.pop()]
    tree = DraftTree(tokens, parents, torch.zeros_like(parents), ancestor_bitmasks(parents), draws)
    proposals = Proposals(q_tokens, q / q.sum(dim=2, keepdim=True))
    logits, params = 2 * torch.randn(b * width, vocab, generator=gen), random_params(b, vocab, gen)
    u = torch.rand(b, 6, num_uniforms, generator=gen, dtype=torch.float64)
    functions = (sampling.verify_tree, verifying.verify_tree)
    found, wanted = (f(tree, logits, params, proposals, u, 6, filters=filters) for f in functions)
    for name, x, y in zip(found._fields, found, wanted, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), name


@prop
@given(seeds, st.integers(0, 5), st.integers(1, 128), st.integers(1, 8), st.booleans(), st.lists(weights, max_size=4))
def test_propose(seed: int, rows: int, size: int, k: int, mapped: bool, slot_weights: list[float]) -> None:
    gen = torch.Generator().manual_seed(seed)
    vocab, k = 200, min(k, size)
    logp, index = (2 * torch.randn(rows, vocab, generator=gen)).log_softmax(-1).topk(size)
    to_target = torch.randperm(1000, generator=gen)[:vocab] if mapped else None
    u = torch.rand(rows, len(slot_weights), generator=gen, dtype=torch.float64)
    arguments = (logp, index, random_params(rows, vocab, gen), u, k)
    options = {"first_row": 3, "rows_per_request": 2, "draft_to_target": to_target, "slot_weights": slot_weights}
    found, wanted = (f(*arguments, **options) for f in (sampling.propose, proposing.propose))
    for name in ("tokens", "draws", "q_tokens"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    torch.testing.assert_close(found.logp, wanted.logp, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.q_weights, wanted.q_weights, rtol=1e-5, atol=1e-7)
    drawn = (found.draws[:, k:] >= 0).any(dim=1)
    assert torch.allclose(found.q_weights.sum(dim=1)[drawn], torch.ones(()))
    deterministic = found.tokens[drawn, :k]  # q' gives nothing to the deterministic children
    inside = (found.q_tokens[drawn][:, None] == deterministic[:, :, None]) & (found.q_weights[drawn][:, None] > 0)
    assert not bool(inside.any())
    for row in range(rows):  # without replacement
        tokens = found.tokens[row, k:][found.draws[row, k:] >= 0].tolist()
        assert len(set(tokens)) == len(tokens)


def test_the_score_of_a_slot_is_its_weight_of_the_mass_that_it_is_drawn_from() -> None:
    """In closed form, so that a weight which kernel and oracle both ignore is noticed."""
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    params = SamplingParams.of(1)
    for slot_weights in ([0.4, 0.12], [0.9], [0.5, 0.25, 0.125]):
        u = torch.full((1, len(slot_weights)), 0.5, dtype=torch.float64)
        rows = {"first_row": 0, "rows_per_request": 1, "slot_weights": slot_weights}
        children = sampling.propose(p.log(), torch.arange(4)[None], params, u, 1, **rows)
        torch.testing.assert_close(children.logp[0].exp(), torch.tensor([0.4, *(0.6 * w for w in slot_weights)]))
        assert children.draws[0].tolist() == [-1] + [0] * len(slot_weights)


def test_sampled_children_are_drawn_from_what_is_stored_without_replacement() -> None:
    gen = torch.Generator().manual_seed(5)
    n, k, vocab = 40_000, 2, 8
    logp, index = (1.5 * torch.randn(1, vocab, generator=gen)).log_softmax(-1).topk(vocab)
    params = SamplingParams.of(n, 0.8, top_k=7, top_p=0.99)
    u = torch.rand(n, NUM_SAMPLED, generator=gen, dtype=torch.float64)
    rows = (logp.expand(n, vocab).contiguous(), index.expand(n, vocab).contiguous())
    children = sampling.propose(*rows, params, u, k, first_row=0, rows_per_request=1)
    assert bool((children.draws[:, k:] >= 0).all())
    counts = torch.bincount(children.tokens[:, k] * vocab + children.tokens[:, k + 1], minlength=vocab**2).double()
    q = torch.zeros(vocab).scatter_(0, children.q_tokens[0], children.q_weights[0]).double()
    second = (q[None] / (1 - q[:, None])).fill_diagonal_(0)
    wanted = (q[:, None] * second).view(-1) * n
    cells = wanted > 5
    assert counts[wanted == 0].sum() == 0
    scale = counts[cells].sum() / wanted[cells].sum()
    assert scipy.stats.chisquare(counts[cells], wanted[cells] * scale).pvalue > 1e-4
    shifted = wanted[cells].roll(1)
    assert scipy.stats.chisquare(counts[cells], shifted * counts[cells].sum() / shifted.sum()).pvalue < 1e-12


@prop
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), st.integers(0, 2**40), seeds)
def test_uniforms_are_philox(keys: list[int], counter: int, stream: int) -> None:
    key = torch.tensor(keys)
    counters = torch.arange(len(keys)) + counter
    for n in (0, 1, 2, 7):
        assert torch.equal(sampling.uniforms(key, counters, stream, n), rng.uniforms(key, counters, stream, n))


def test_philox_known_answer() -> None:
    """The first of the known-answer vectors of Random123 (kat_vectors, philox4x32-10, counter and key zero)."""
    output = rng._philox([torch.zeros(1, 1, dtype=torch.int64)] * 4, [torch.zeros(1, 1, dtype=torch.int64)] * 2)
    assert [int(word) for word in output] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_uniforms_are_uniform_and_independent_of_the_batch() -> None:
    keys = torch.arange(2000)
    u = sampling.uniforms(keys, torch.full_like(keys, 7), 1, 20)
    assert scipy.stats.kstest(u.view(-1).numpy(), "uniform").pvalue > 1e-3
    assert torch.equal(u[1234:1235], sampling.uniforms(keys[1234:1235], torch.tensor([7]), 1, 20))
    assert not torch.equal(u, sampling.uniforms(keys, torch.full_like(keys, 7), 2, 20))
    assert abs(torch.corrcoef(u[:, :2].T)[0, 1].item()) < 0.1


def test_rows_may_have_gaps() -> None:
    """Engines slice a padded vocabulary: the rows of the logits are further apart than they are long."""
    gen = torch.Generator().manual_seed(3)
    padded, params = 3 * torch.randn(8, 64, generator=gen), random_params(8, 50, gen)
    u = torch.rand(8, generator=gen, dtype=torch.float64)
    padded[:, 50:] = 100  # must not be seen
    assert torch.equal(draw(padded[:, :50], params, u), draw(padded[:, :50].contiguous(), params, u))


@prop
@given(seeds, st.integers(0, 5), st.integers(1, 64), st.integers(1, 9), st.integers(1, 3), st.booleans())
def test_greedy_walks_are_the_greedy_oracles(
    seed: int, b: int, width: int, max_accept_length: int, vocab: int, corrupt: bool
) -> None:
    """A greedy row follows the argmax; parents that form a cycle or leave the tree cannot lead the walk out of it."""
    gen = torch.Generator().manual_seed(seed)
    parents = random_parents(b, width, gen)
    if corrupt:
        parents += torch.randint(-2, 3, parents.shape, generator=gen).int()
    tokens = torch.randint(0, vocab, (b, width), generator=gen)
    logits = torch.randn(b * width, vocab, generator=gen).round()
    none = torch.full_like(parents, -1)
    drafted = DraftTree(tokens, parents, none, ancestor_bitmasks(random_parents(b, width, gen)), none)
    params = SamplingParams.greedy(b)
    u = torch.rand(b, max_accept_length, 1, generator=gen, dtype=torch.float64)
    found = sampling.verify_tree(drafted, logits, params, Proposals.none(b), u, max_accept_length)
    wanted = verifying.verify_greedy(tokens, parents, logits.view(b, width, vocab).argmax(-1), max_accept_length)
    for name, x, y in zip(found._fields, found, wanted, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), name


def test_a_corrupt_walk_is_caught() -> None:
    """Negative control: the comparison above sees a single wrong parent, and a cycle through the root ends."""
    zeros, none = torch.zeros(1, 8, dtype=torch.int64), torch.full((1, 8), -1, dtype=torch.int32)
    parents = torch.tensor([[-1, 0, 1, 2, 3, 4, 5, 6]], dtype=torch.int32)
    params, u = SamplingParams.greedy(1), torch.zeros(1, 9, 1, dtype=torch.float64)

    def walk() -> verifying.Accepted:
        tree = DraftTree(zeros, parents, none, zeros, none)
        return sampling.verify_tree(tree, torch.zeros(8, 3), params, Proposals.none(1), u, 9)

    right = walk()
    assert right.lengths.tolist() == [8]
    parents[0, 4] = -1
    assert not torch.equal(walk().index, right.index)
    parents[0, 0] = parents[0, 4] = 3
    assert walk().lengths.tolist() == [9]
