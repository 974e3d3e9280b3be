"""The verification oracles, and the distribution that they draw from, against plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_distribution import chain_filters

from eagle_plugin.core.sampling import SamplingParams, target_distribution
from eagle_plugin.core.verify import Accepted, compact_rows, verify_greedy

prop = settings(derandomize=True, deadline=None, max_examples=150, database=None)


@st.composite
def walks(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int]:
    width = draw(st.integers(1, 64))
    # a random tree with some padding (parent -1) and few distinct tokens, so that deep paths are accepted
    parents = [-1, *(draw(st.integers(-1, i - 1)) for i in range(1, width))]
    vocabulary = draw(st.integers(1, 3))
    tokens = draw(st.lists(st.integers(0, vocabulary - 1), min_size=width, max_size=width))
    targets = draw(st.lists(st.integers(0, vocabulary - 1), min_size=width, max_size=width))
    return parents, tokens, targets, draw(st.integers(1, 9))


def walk(parents: list[int], tokens: list[int], targets: list[int], max_accept_length: int) -> list[int]:
    path = [0]
    while len(path) < max_accept_length:
        children = [c for c, p in enumerate(parents) if p == path[-1] and tokens[c] == targets[path[-1]]]
        if not children:
            break
        path.append(children[0])
    return path


def run(parents: list[int], tokens: list[int], targets: list[int], max_accept_length: int) -> Accepted:
    return verify_greedy(
        torch.tensor([tokens]), torch.tensor([parents], dtype=torch.int32), torch.tensor([targets]), max_accept_length
    )


@prop
@given(walks())
def test_walk(case: tuple[list[int], list[int], list[int], int]) -> None:
    parents, tokens, targets, max_accept_length = case
    path = walk(*case)
    accepted = run(*case)
    assert accepted.index[0].tolist() == path + [-1] * (max_accept_length - len(path))
    assert int(accepted.lengths[0]) == len(path)
    generated = [tokens[n] for n in path[1:]] + [targets[path[-1]]]
    assert accepted.tokens[0].tolist() == generated + [0] * (max_accept_length - len(generated))


def test_the_walk_leaves_the_tree_when_the_target_disagrees() -> None:
    parents, tokens, targets = [-1, 0, 1, 2], [0, 5, 6, 7], [5, 6, 7, 8]
    assert run(parents, tokens, targets, 8).tokens[0, :4].tolist() == [5, 6, 7, 8]
    targets[1] = 9  # one different choice: the rest of the path is lost, the bonus token is the target's
    assert run(parents, tokens, targets, 8).tokens[0].tolist() == [5, 9, 0, 0, 0, 0, 0, 0]


@prop
@given(st.integers(0, 2**31), st.integers(0, 3), st.integers(1, 10), st.integers(1, 8))
def test_compact_rows(seed: int, b: int, width: int, max_accept_length: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    cache = torch.randn(b * width + 5, 2, 3, generator=gen)
    window = torch.randperm(b * width + 5, generator=gen)[: b * width].view(b, width)
    lengths = torch.randint(0, min(width, max_accept_length) + 1, (b,), generator=gen).int()
    index = torch.full((b, max_accept_length), -1, dtype=torch.int32)
    for i in range(b):
        n = int(lengths[i])
        index[i, :n] = torch.randperm(width, generator=gen)[:n]  # any order: sources are read before rows are written
    wanted = cache.clone()
    for i in range(b):
        for j in range(int(lengths[i])):
            wanted[window[i, j]] = cache[window[i, int(index[i, j])]]
    compact_rows(cache, window, index, lengths)
    assert torch.equal(cache, wanted)


@prop
@given(st.integers(0, 2**31), st.sampled_from([1, 2, 9, 60, 700]), st.sampled_from([0, 1, 2]))
def test_chained_filters(seed: int, vocab: int, fineness: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    rows = 24
    logits = 3 * torch.randn(rows, vocab, generator=gen)
    logits = (logits.round(), logits.bfloat16().float(), logits)[fineness]  # many ties, some, none
    masked = torch.rand(rows, vocab, generator=gen) < 0.2 * torch.randint(0, 3, (rows, 1), generator=gen)
    masked[:, 0] = False
    logits = logits.masked_fill(masked, -torch.inf)

    def some(values: torch.Tensor, off: float) -> torch.Tensor:
        return torch.where(torch.rand(rows, generator=gen) < 0.6, values, off)

    params = SamplingParams.of(rows)._replace(
        temperatures=0.2 + 1.8 * torch.rand(rows, generator=gen),
        top_ks=some(torch.randint(2, vocab + 3, (rows,), generator=gen), 2**30).int(),
        top_ps=some(torch.rand(rows, generator=gen), 1.0),
        min_ps=some(0.5 * torch.rand(rows, generator=gen), 0.0),
    )
    p = (logits.double() / params.temperatures[:, None]).softmax(-1)
    top_ps, min_ps = params.top_ps[:, None].double(), params.min_ps[:, None].double()
    wanted = chain_filters(p, params.top_ks[:, None].long(), top_ps, min_ps)
    torch.testing.assert_close(target_distribution(logits, params, "chained"), wanted, rtol=1e-9, atol=1e-15)
    greedy = target_distribution(logits, params._replace(top_ks=torch.ones(rows).int()), "chained")
    assert torch.equal(greedy, torch.nn.functional.one_hot(logits.argmax(-1), vocab).double())


@pytest.mark.parametrize(
    ("weights", "setting", "joint", "chained"),
    [
        ([0.4, 0.3, 0.2, 0.1], {"top_k": 3, "top_p": 0.75}, [0, 1, 2], [0, 1]),  # before the third: 0.7 of 0.9
        ([0.4, 0.3, 0.2, 0.1], {"min_p": 0.4, "top_p": 0.75}, [0, 1, 2], [0, 1]),
        ([0.4, 0.1, 0.1, 0.4], {"top_k": 3}, [0, 1, 3], [0, 1, 2, 3]),  # all that equal the third
        ([0.1, 0.4, 0.4, 0.1], {"top_k": 2}, [1, 2], [1, 2]),
        ([0.25, 0.25, 0.25, 0.25], {"top_p": 0.5}, [0, 1, 2], [0, 1]),  # exactly half is before the third
        ([0.25, 0.25, 0.25, 0.25], {"top_p": 0.0}, [0], [0]),
        ([0.25, 0.25, 0.25, 0.25], {"top_k": 1}, [0], [0]),
        ([0.25, 0.25, 0.25, 0.25], {"top_k": 2, "top_p": 0.6}, [0, 1], [0, 1, 2]),
    ],
)
def test_what_the_meanings_of_the_filters_keep(
    weights: list[float], setting: dict[str, float], joint: list[int], chained: list[int]
) -> None:
    params = SamplingParams.of(1, **setting)  # type: ignore[arg-type]
    logits = torch.tensor([weights]).log()
    for filters, kept in (("joint", joint), ("chained", chained)):
        p = target_distribution(logits, params, filters)[0]  # type: ignore[arg-type]
        assert p.nonzero()[:, 0].tolist() == kept, filters
        torch.testing.assert_close(p[kept].float(), torch.tensor(weights)[kept] / sum(weights[i] for i in kept))


def test_unknown_filters_are_named() -> None:
    params = SamplingParams.greedy(1)
    with pytest.raises(ValueError, match="filters is 'both', wanted 'joint'"):
        target_distribution(torch.zeros(1, 3), params, "both")  # type: ignore[arg-type]
