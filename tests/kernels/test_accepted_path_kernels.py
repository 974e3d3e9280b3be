"""The accepted paths as rows against the oracle; wrong arguments of both paths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import prop

from eagle_plugin.core import accepted_path as oracle
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels import accepted_path as kernels


def random_paths(seed: int, b: int, longest: int, width: int) -> tuple[Accepted, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (b,), generator=gen, dtype=torch.int32)
    index = torch.randint(0, width, (b, longest), generator=gen, dtype=torch.int32)
    index[torch.arange(longest) >= lengths[:, None]] = -1
    tokens = torch.randint(0, 2**40, (b, longest), generator=gen)
    return Accepted(index, lengths, tokens), torch.randint(0, 2**33, (b,), generator=gen)


@prop
@given(st.integers(0, 2**31), st.integers(0, 5), st.integers(1, 65), st.integers(1, 64))
def test_read_path(seed: int, b: int, longest: int, width: int) -> None:
    accepted, prefix_lens = random_paths(seed, b, longest, width)
    found = kernels.read_path(accepted, prefix_lens, width)
    wanted = oracle.read_path(accepted, prefix_lens, width)
    for name, x, y in zip(wanted._fields, found, wanted, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), name


def test_a_path_by_hand(path: str) -> None:
    accepted = Accepted(
        torch.tensor([[0, 2, 4], [0, 3, -1]], dtype=torch.int32),
        torch.tensor([3, 2], dtype=torch.int32),
        torch.tensor([[11, 12, 13], [21, 22, 0]]),
    )
    found = kernels.read_path(accepted, torch.tensor([7, 100]), 5)
    assert found.rows.tolist() == [[0, 2, 4], [5, 8, 5]]
    assert found.positions.tolist() == [[7, 8, 9], [100, 101, 102]]
    assert found.last.tolist() == [2, 4] and found.roots.tolist() == [13, 22]


@pytest.mark.parametrize("length", [-3, 0, 9])
def test_an_impossible_length_names_an_end_of_the_path(path: str, length: int) -> None:
    accepted = Accepted(
        torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([length], dtype=torch.int32), torch.tensor([[5, 6]])
    )
    found = kernels.read_path(accepted, torch.tensor([3]), 4)
    assert (found.last.item(), found.roots.item()) == ((1, 6) if length > 2 else (0, 5))


def test_wrong_arguments_are_named(path: str) -> None:
    accepted, prefix_lens = random_paths(0, 2, 3, 4)
    with pytest.raises(TypeError, match="accepted.lengths is int64, wanted int32"):
        kernels.read_path(accepted._replace(lengths=accepted.lengths.long()), prefix_lens, 4)
    with pytest.raises(ValueError, match="prefix_lens"):
        kernels.read_path(accepted, prefix_lens[:1], 4)
    with pytest.raises(ValueError, match="accepted.index has 0 places"):
        kernels.read_path(
            Accepted(accepted.index[:, :0].contiguous(), accepted.lengths, accepted.tokens[:, :0].contiguous()),
            prefix_lens,
            4,
        )
