"""The kernels that share noise against `core.gumbel`, and draws of theirs against the target's distribution."""

from __future__ import annotations

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import ancestor_bitmasks, prop, random_params, random_parents
from torch import Tensor

from eagle_plugin.core import gumbel as oracle
from eagle_plugin.core.sampling import Filters, SamplingParams, target_distribution
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.kernels import gumbel

seeds = st.integers(0, 2**31)
meanings = pytest.mark.parametrize("filters", ["joint", "chained"])


def keys(n: int, gen: torch.Generator) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=gen)


def roots(b: int) -> DraftTree:
    return DraftTree.padding(torch.zeros(b, dtype=torch.int64), 1)


def draw(logits: Tensor, params: SamplingParams, rng_keys: Tensor, places: Tensor, filters: Filters) -> Tensor:
    """One token per row."""
    return gumbel.verify_coupled(roots(len(logits)), logits, params, rng_keys, places, 1, filters=filters).tokens[:, 0]


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
    wanted = oracle.draw_coupled(logits, params, rng_keys, places, filters)
    for i in (found != wanted).nonzero()[:, 0].tolist():  # only where rounding decides: what is kept, or who has most
        p = target_distribution(logits[i][None], params.rows(slice(i, i + 1)), filters)[0]
        two = torch.stack([found[i], wanted[i]])
        noised = p[two].log() + oracle.gumbel_noise(rng_keys[i][None], places[i][None], two[None])[0]
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
    none = torch.full_like(parents, -1)
    ancestors = ancestor_bitmasks(parents)
    depths = torch.zeros_like(parents)
    for node in range(1, width):
        above = parents[:, node : node + 1].long()
        depths[:, node] = torch.where(above < 0, 0, depths.gather(1, above.clamp(min=0)) + 1)[:, 0].int()
    tree = DraftTree(tokens, parents, depths, ancestors, none)
    logits = torch.randn(b * width, vocab, generator=gen)
    params = SamplingParams.of(b)._replace(top_ks=torch.tensor([1, 2**30, 3], dtype=torch.int32))
    given = (tree, logits, params, keys(b, gen), torch.randint(0, 99, (b,), generator=gen), longest)
    found = gumbel.verify_coupled(*given, filters=filters)
    wanted = oracle.verify_coupled(*given, filters=filters)
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
    scores, tokens = gumbel.propose_coupled(*given, k, to_target)
    wanted, wanted_tokens = oracle.propose_coupled(*given, k, to_target)
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


def test_infinite_and_missing_logits() -> None:
    inf, nan = torch.inf, torch.nan
    rows = [[0.0, inf, 1.0, -inf], [nan, 2.0, nan, -inf], [-inf, -inf, -inf, 0.0], [inf, 0.0, inf, 0.0], [-inf] * 4]
    logits = torch.tensor(rows).repeat_interleave(200, dim=0)
    n = len(logits)
    drawn = draw(logits, SamplingParams.of(n), keys(n, torch.Generator().manual_seed(3)), torch.arange(n), "joint")
    assert [sorted(set(row)) for row in drawn.view(5, 200).tolist()] == [[1], [1], [3], [0, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("name", ["rng_keys", "positions"])
def test_a_wrong_shape_is_named(name: str) -> None:
    given = {
        "logp": torch.zeros(2, 3), "index": torch.zeros(2, 3).long(), "params": SamplingParams.of(2),
        "rng_keys": torch.zeros(2).long(), "positions": torch.zeros(2).long(), "k": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"{name} has shape \\[1\\], wanted \\[2\\]"):
        gumbel.propose_coupled(**given | {name: torch.zeros(1).long()})  # type: ignore[arg-type]
