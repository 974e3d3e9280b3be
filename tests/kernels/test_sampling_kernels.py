"""The sampling kernels against the oracles and the target's distribution: ties, infinities, walks, random numbers."""

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
from eagle_plugin.core.gumbel import draw_tokens, gumbel_noise
from eagle_plugin.core.sampling import Filters, SamplingParams, target_distribution
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.kernels import sampling

seeds = st.integers(0, 2**31)
meanings = pytest.mark.parametrize("filters", ["joint", "chained"])


def keys(n: int, gen: torch.Generator) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=gen)


def roots(b: int) -> DraftTree:
    return DraftTree.padding(torch.zeros(b, dtype=torch.int64), 1)


def draw(logits: Tensor, params: SamplingParams, rng_keys: Tensor, places: Tensor, filters: Filters) -> Tensor:
    """One token per row."""
    return sampling.verify_tree(roots(len(logits)), logits, params, rng_keys, places, 1, filters=filters).tokens[:, 0]


@meanings
@prop
@given(seed=seeds, b=st.integers(1, 6), vocab=st.sampled_from([1, 2, 7, 63, 64, 65, 300, 5000]), coarse=st.booleans())
def test_draws_are_the_oracles(filters: Filters, seed: int, b: int, vocab: int, coarse: bool) -> None:
    gen = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(b, vocab, generator=gen)
    if coarse:
        logits = logits.round()  # many equals, so that top-k and top-p cut between them
        logits[torch.rand(b, vocab, generator=gen) < 0.1] = -torch.inf
    params, rng_keys = random_params(b, vocab, gen), keys(b, gen)
    places = torch.randint(0, 2**40, (b,), generator=gen)
    found = draw(logits, params, rng_keys, places, filters)
    wanted = draw_tokens(logits, params, rng_keys, places, filters)
    for i in (found != wanted).nonzero()[:, 0].tolist():  # only where rounding decides: what is kept, or who has most
        p = target_distribution(logits[i][None], params.rows(slice(i, i + 1)), filters)[0]
        two = torch.stack([found[i], wanted[i]])
        noised = p[two].log() + gumbel_noise(rng_keys[i][None], places[i][None], two[None])[0]
        at_an_edge = bool((p[two] == 0).any()) or float(p[p > 0].min()) > 0.9 * float(p[two].min())
        assert abs(float(noised[0] - noised[1])) < 1e-4 or at_an_edge


@meanings
@prop
@given(seed=seeds, width=st.integers(1, 12), longest=st.integers(1, 5))
def test_walks_are_the_oracles(filters: Filters, seed: int, width: int, longest: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    b, vocab = 3, 6
    parents = random_parents(b, width, gen)
    tokens = torch.randint(0, vocab, (b, width), generator=gen)
    ancestors = ancestor_bitmasks(parents)
    depths = torch.zeros_like(parents)
    for node in range(1, width):
        above = parents[:, node : node + 1].long()
        depths[:, node] = torch.where(above < 0, 0, depths.gather(1, above.clamp(min=0)) + 1)[:, 0].int()
    tree = DraftTree(tokens, parents, depths, ancestors)
    logits = torch.randn(b * width, vocab, generator=gen)
    params = SamplingParams.of(b)._replace(top_ks=torch.tensor([1, 2**30, 3], dtype=torch.int32))
    given = (tree, logits, params, keys(b, gen), torch.randint(0, 99, (b,), generator=gen), longest)
    found = sampling.verify_tree(*given, filters=filters)
    wanted = verifying.verify_tree(*given, filters=filters)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@prop
@given(seed=seeds, size=st.sampled_from([1, 5, 64, 128]), k=st.integers(1, 8), mapped=st.booleans())
def test_children_are_the_oracles(seed: int, size: int, k: int, mapped: bool) -> None:
    gen = torch.Generator().manual_seed(seed)
    rows, k = 5, min(k, size)
    logp = (2 * torch.randn(rows, 2 * size, generator=gen)).log_softmax(1).sort(descending=True).values[:, :size]
    index = torch.stack([torch.randperm(2 * size, generator=gen)[:size] for _ in range(rows)])
    to_target = torch.randperm(1000, generator=gen)[: 2 * size] if mapped else None
    given = logp.contiguous(), index, random_params(rows, size, gen), keys(rows, gen), torch.arange(rows) * 2**33
    scores, tokens = sampling.propose(*given, k, to_target)
    wanted, wanted_tokens = proposing.propose(*given, k, to_target)
    torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(tokens, wanted_tokens)


@meanings
def test_draws_of_a_large_vocabulary_have_its_distribution(filters: Filters) -> None:
    """What is left out early, of tokens that cannot win, must not be missing: also of those that hardly ever do."""
    gen = torch.Generator().manual_seed(2)
    n, vocab = 30_000, 3000
    logits = torch.cat([torch.tensor([9.0, 8.0, 7.5]), torch.randn(vocab - 3, generator=gen)])[None]
    params = SamplingParams.of(n)
    drawn = torch.cat(
        [
            draw(logits.repeat(len(part), 1), params.rows(slice(len(part))), part, torch.arange(len(part)), filters)
            for part in keys(n, gen).split(3000)
        ]
    )
    p = target_distribution(logits, params.rows(slice(1)), filters)[0]
    counts = torch.bincount(drawn, minlength=vocab)
    cells, wanted = torch.cat([counts[:3], counts[3:].sum()[None]]), torch.cat([p[:3], p[3:].sum()[None]]) * n
    assert scipy.stats.chisquare(cells.numpy(), wanted.numpy()).pvalue > 1e-4
    tail = counts[3:][torch.arange(vocab - 3) % 2 == 0].sum(), p[3:][torch.arange(vocab - 3) % 2 == 0].sum()
    assert scipy.stats.binomtest(int(tail[0]), n, float(tail[1])).pvalue > 1e-4
    assert scipy.stats.binomtest(int(tail[0]), n, float(tail[1]) * 1.3).pvalue < 1e-9  # so many would show an error


@meanings
def test_infinite_and_missing_logits(filters: Filters) -> None:
    inf, nan = torch.inf, torch.nan
    rows = [[0.0, inf, 1.0, -inf], [nan, 2.0, nan, -inf], [-inf, -inf, -inf, 0.0], [inf, 0.0, inf, 0.0], [-inf] * 4]
    logits = torch.tensor(rows).repeat_interleave(200, dim=0)
    n = len(logits)
    rng_keys = keys(n, torch.Generator().manual_seed(3))
    drawn = draw(logits, SamplingParams.of(n), rng_keys, torch.arange(n), filters).view(5, 200)
    # A mask that allows nothing: any token, but a token.
    assert [sorted(set(row)) for row in drawn.tolist()] == [[1], [1], [3], [0, 2], [0, 1, 2, 3]]
    greedy = draw(logits, SamplingParams.greedy(n), rng_keys, torch.arange(n), filters)
    assert greedy.view(5, 200)[:, 0].tolist() == [1, 1, 3, 0, 0]


@meanings
def test_the_kept_tokens_are_the_oracles(filters: Filters) -> None:
    """Which tokens can come out at all, over many keys: ties at the cut go to the lower ids."""
    gen = torch.Generator().manual_seed(1)
    n, vocab = 40_000, 24
    for _ in range(20):
        logits, params = (2 * torch.randn(1, vocab, generator=gen)).round(), random_params(1, vocab, gen)
        every = logits.expand(n, vocab).contiguous(), params.for_rows(n), keys(n, gen), torch.arange(n)
        seen = set(draw(*every, filters).tolist())
        p = target_distribution(logits, params, filters)[0]
        assert seen >= set((p > 20 / n).nonzero()[:, 0].tolist())
        assert seen <= set((p > 0).nonzero()[:, 0].tolist())


def test_a_token_with_exactly_top_p_before_it() -> None:
    every = torch.zeros(100, 4), SamplingParams.of(100, top_p=0.5), torch.arange(100), torch.arange(100)
    kept = [set(draw(*every, filters).tolist()) for filters in ("joint", "chained")]
    assert kept == [{0, 1, 2}, {0, 1}]


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
    padded[:, 50:] = 100  # must not be seen
    rest = params, keys(8, gen), torch.arange(8), "joint"
    assert torch.equal(draw(padded[:, :50], *rest), draw(padded[:, :50].contiguous(), *rest))


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
    drafted = DraftTree(tokens, parents, none, ancestor_bitmasks(random_parents(b, width, gen)))
    params = SamplingParams.greedy(b)
    zeros = torch.zeros(b, dtype=torch.int64)
    found = sampling.verify_tree(drafted, logits, params, zeros, zeros, max_accept_length)
    wanted = verifying.verify_greedy(tokens, parents, logits.view(b, width, vocab).argmax(-1), max_accept_length)
    for name, x, y in zip(found._fields, found, wanted, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), name


def test_a_corrupt_walk_is_caught() -> None:
    """Negative control: the comparison above sees a single wrong parent, and a cycle through the root ends."""
    zeros, none = torch.zeros(1, 8, dtype=torch.int64), torch.full((1, 8), -1, dtype=torch.int32)
    parents = torch.tensor([[-1, 0, 1, 2, 3, 4, 5, 6]], dtype=torch.int32)
    params, place = SamplingParams.greedy(1), torch.zeros(1, dtype=torch.int64)

    def walk() -> verifying.Accepted:
        tree = DraftTree(zeros, parents, none, zeros)
        return sampling.verify_tree(tree, torch.zeros(8, 3), params, place, place, 9)

    right = walk()
    assert right.lengths.tolist() == [8]
    parents[0, 4] = -1
    assert not torch.equal(walk().index, right.index)
    parents[0, 0] = parents[0, 4] = 3
    assert walk().lengths.tolist() == [9]
