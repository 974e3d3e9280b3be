"""The penalty kernels against the oracles, bit for bit; wrong arguments of both paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import ancestor_bitmasks, prop, random_parents
from torch import Tensor

from eagle_plugin.core import penalties as oracle
from eagle_plugin.kernels import penalties
from eagle_plugin.kernels.penalties import Penalties

seeds = st.integers(0, 2**31)
P = 6  # rows of the tables


def random_tables(vocabulary: int, gen: torch.Generator) -> Penalties:
    """Tables of which some strengths are off."""

    def some(values: Tensor, off: float) -> Tensor:
        return torch.where(torch.rand(P, generator=gen) < 0.5, values, off)

    counts = torch.randint(1, 9, (P, vocabulary), generator=gen)
    counts[torch.rand(P, vocabulary, generator=gen) < 0.8] = 0
    stops = torch.randint(-1, vocabulary + 2, (P, 3), generator=gen)  # some outside the vocabulary
    return Penalties(
        counts.int(),
        some(torch.randn(P, generator=gen), 0),
        some(torch.randn(P, generator=gen), 0),
        some(0.5 + torch.rand(P, generator=gen), 1),
        stops,
        some(torch.randint(0, 30, (P,), generator=gen).float(), 0).long(),
    )


def random_trees(b: int, width: int, vocabulary: int, gen: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens with many equals on a path, ancestors and depths."""
    parents = random_parents(b, width, gen)
    depths = torch.zeros(b, width, dtype=torch.int32)
    for node in range(1, width):
        above = depths.gather(1, parents[:, node : node + 1].clamp(min=0).long())[:, 0]
        depths[:, node] = torch.where(parents[:, node] < 0, 0, above + 1)
    few = torch.randint(0, vocabulary, (4,), generator=gen)
    tokens = few[torch.randint(0, 4, (b, width), generator=gen)]
    return tokens, ancestor_bitmasks(parents), depths


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


@prop
@given(seeds, st.integers(0, 4), st.sampled_from([1, 2, 7, 33, 64]), st.sampled_from([1, 5, 90, 2048, 5000]))
def test_penalize_nodes(seed: int, b: int, width: int, vocabulary: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    tables, (tokens, ancestors, depths) = random_tables(vocabulary, gen), random_trees(b, width, vocabulary, gen)
    rows = torch.randint(0, P, (b,), generator=gen)
    lengths = torch.randint(1, 30, (b,), generator=gen)
    padded = torch.randn(b * width, vocabulary + 3, generator=gen)  # engines slice a padded vocabulary
    padded[torch.rand(padded.shape, generator=gen) < 0.1] = -torch.inf
    padded[torch.rand(padded.shape, generator=gen) < 0.1] = -0.0
    found, wanted = padded.clone(), padded.clone()
    for function, logits in ((penalties.penalize_nodes, found), (oracle.penalize_nodes, wanted)):
        function(logits[:, :vocabulary], tokens, ancestors, depths, rows, lengths, tables)
    assert torch.equal(bits(found), bits(wanted))
    off = (tables.frequency == 0) & (tables.presence == 0) & (tables.repetition == 1) & (tables.min_lens == 0)
    plain = off[rows].repeat_interleave(width)
    assert torch.equal(bits(found[plain]), bits(padded[plain]))


def test_a_wide_tree_with_every_node_on_one_path(path: str) -> None:
    """Bit 63 is the sign of an int64, and a token may be on the path 63 times."""
    tables = Penalties(
        torch.tensor([[0, 1, 0]], dtype=torch.int32),
        *(torch.tensor([x]) for x in (0.5, 0.25, 1.0)),
        torch.tensor([[2]]),
        torch.tensor([70]),
    )
    ancestors = torch.tensor([[2 ** (i + 1) - 1 for i in range(63)] + [-1]])
    logits = torch.zeros(64, 3)
    tokens = torch.ones(1, 64, dtype=torch.int64)
    tokens[0, 40] = 0
    depths = torch.arange(64, dtype=torch.int32)[None]
    penalties.penalize_nodes(logits, tokens, ancestors, depths, torch.tensor([0]), torch.tensor([10]), tables)
    times = torch.arange(1, 65) - (torch.arange(64) >= 40).long()
    assert logits[:, 1].tolist() == (-0.25 - 0.5 * times).tolist()
    assert logits[:, 0].tolist() == [0.0] * 40 + [-0.75] * 24
    assert logits[:, 2].tolist() == [-torch.inf] * 60 + [0.0] * 4


@prop
@given(seeds, st.integers(0, 5), st.integers(1, 9), st.sampled_from([1, 4, 300]))
def test_count_tokens(seed: int, b: int, most: int, vocabulary: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, P, (b,), generator=gen)  # padding lanes of a batch share a row
    tokens = torch.randint(0, vocabulary, (b, most), generator=gen)
    lengths = torch.randint(0, most + 1, (b,), generator=gen).int()
    found = torch.randint(0, 9, (P, vocabulary), generator=gen).int()
    wanted = found.clone()
    penalties.count_tokens(found, rows, tokens, lengths)
    oracle.count_tokens(wanted, rows, tokens, lengths)
    assert torch.equal(found, wanted)


def nodes(**changes: Any) -> None:
    tables = Penalties(
        torch.ones(3, 5, dtype=torch.int32),
        *(torch.ones(3) for _ in range(3)),
        torch.zeros(3, 2, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
    )
    given: dict[str, Any] = {
        "logits": torch.zeros(4, 5),
        "tokens": torch.zeros(2, 2, dtype=torch.int64),
        "ancestors": torch.ones(2, 2, dtype=torch.int64),
        "depths": torch.zeros(2, 2, dtype=torch.int32),
        "rows": torch.tensor([0, 2]),
        "lengths": torch.tensor([4, 5]),
    }
    in_tables = {name: changes.pop(name) for name in list(changes) if name in Penalties._fields}
    penalties.penalize_nodes(**(given | changes), penalties=tables._replace(**in_tables))


WRONG_NODES = [
    ({"logits": torch.zeros(4, 5).double()}, TypeError, "logits is float64, wanted float32: convert it with .to()"),
    ({"logits": torch.zeros(3, 5)}, ValueError, "logits has shape [3, 5], wanted [4, *]: pass a tensor of that shape"),
    ({"depths": torch.zeros(2, 2)}, TypeError, "depths is float32, wanted int32"),
    ({"rows": torch.tensor([0, 2]).int()}, TypeError, "rows is int32, wanted int64"),
    ({"lengths": torch.tensor([4])}, ValueError, "lengths has shape [1], wanted [2]"),
    ({"counts": torch.ones(3, 6).int()}, ValueError, "penalties.counts has shape [3, 6], wanted [*, 5]"),
    ({"presence": torch.ones(2)}, ValueError, "penalties.presence has shape [2], wanted [3]"),
    ({"stops": torch.ones(3)}, TypeError, "penalties.stops is float32, wanted int64"),
    ({"min_lens": torch.ones(3)}, TypeError, "penalties.min_lens is float32, wanted int64"),
]
WRONG_VALUES_OF_NODES = [
    ({"rows": torch.tensor([0, 3])}, ValueError, "rows[1] is 3, wanted 0 to 2: the tables have a row for each request"),
    ({"rows": torch.tensor([-1, 0])}, ValueError, "rows[0] is -1, wanted 0 to 2"),
]


def refuse(call: Any, wrong: tuple[dict[str, Any], type[Exception], str]) -> None:
    changes, error, sentence = wrong
    call()
    with pytest.raises(error) as caught:
        call(**changes)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("wrong", WRONG_NODES, ids=lambda wrong: wrong[2][:40])
def test_wrong_arguments_of_penalize_nodes(path: str, wrong: tuple[dict[str, Any], type[Exception], str]) -> None:
    refuse(nodes, wrong)


@pytest.mark.parametrize("wrong", WRONG_VALUES_OF_NODES, ids=lambda wrong: wrong[2][:40])
def test_wrong_values_of_penalize_nodes(path: str, wrong: tuple[dict[str, Any], type[Exception], str]) -> None:
    refuse(nodes, wrong)


def test_a_tree_that_is_too_wide(path: str) -> None:
    for width in (0, 65):
        wide = {name: torch.zeros(2, width, dtype=torch.int64) for name in ("tokens", "ancestors")}
        depths = torch.zeros(2, width, dtype=torch.int32)
        with pytest.raises(ValueError, match=f"tokens has {width} nodes per request, wanted 1 to 64"):
            nodes(logits=torch.zeros(2 * width, 5), depths=depths, **wide)


def count(**changes: Any) -> None:
    given = {
        "counts": torch.zeros(3, 5, dtype=torch.int32),
        "rows": torch.tensor([0, 2]),
        "tokens": torch.tensor([[1, 4], [2, 9]]),
        "lengths": torch.tensor([2, 1], dtype=torch.int32),
    }
    penalties.count_tokens(**(given | changes))


@pytest.mark.parametrize(
    "wrong",
    [
        ({"counts": torch.zeros(3, 5)}, TypeError, "counts is float32, wanted int32"),
        ({"rows": torch.tensor([0])}, ValueError, "rows has shape [1], wanted [2]"),
        ({"lengths": torch.tensor([2, 1])}, TypeError, "lengths is int64, wanted int32"),
    ],
    ids=lambda wrong: wrong[2][:40],
)
def test_wrong_arguments_of_count_tokens(path: str, wrong: tuple[dict[str, Any], type[Exception], str]) -> None:
    refuse(count, wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        ({"rows": torch.tensor([0, 3])}, ValueError, "rows[1] is 3, wanted 0 to 2: the tables have a row for each"),
        ({"lengths": torch.tensor([3, 1]).int()}, ValueError, "lengths[0] is 3, wanted 0 to 2: pass the lengths of"),
        ({"lengths": torch.tensor([2, -1]).int()}, ValueError, "lengths[1] is -1, wanted 0 to 2"),
        ({"lengths": torch.tensor([2, 2]).int()}, ValueError, "tokens[1, 1] is 9, wanted 0 to 4: counts has a column"),
    ],
    ids=lambda wrong: wrong[2][:40],
)
def test_wrong_values_of_count_tokens(path: str, wrong: tuple[dict[str, Any], type[Exception], str]) -> None:
    refuse(count, wrong)
