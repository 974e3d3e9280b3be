"""The start of a round against the oracle, buffer by buffer; wrong arguments of both paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import prop

from eagle_plugin.core import round_start as oracle
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.kernels import round_start
from eagle_plugin.kernels.round_start import RoundStart


def some_sampling(b: int) -> SamplingParams:
    top_ks = torch.arange(2, 2 + b, dtype=torch.int32)
    return SamplingParams.of(b, top_p=0.9, min_p=0.1)._replace(temperatures=0.5 + torch.arange(b), top_ks=top_ks)


def spoiled(padded: int, reach: int, context: int) -> RoundStart:
    """Buffers with what an earlier round left there."""
    out = RoundStart.empty(padded, reach, context)
    for tensor in (*out[:5], *out.sampling):
        tensor.fill_(-7)
    return out


def same(found: RoundStart, wanted: RoundStart) -> bool:
    pairs = zip((*found[:5], *found.sampling), (*wanted[:5], *wanted.sampling), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@prop
@given(
    st.integers(0, 2**31),
    st.integers(0, 4),
    st.integers(0, 3),
    st.sampled_from([0, 1, 9]),
    st.sampled_from([1, 40, 9000]),
    st.sampled_from([1, 40, 8200]),
)
def test_start_round(seed: int, b: int, padding: int, reach: int, context: int, width: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 5, (b,), generator=gen)
    lengths = torch.randint(0, context + 2, (b,), generator=gen)
    req_to_token = torch.randint(1, 2**31 - 1, (5, context + 3), generator=gen).int()[:, :context]
    keys = torch.randint(-(2**63), 2**63 - 1, (5,), generator=gen)
    found, wanted = (spoiled(b + padding, reach, width) for _ in range(2))
    round_start.start_round(found, lengths, rows, req_to_token, keys, some_sampling(b))
    oracle.start_round(wanted, lengths, rows, req_to_token, keys, some_sampling(b))
    assert same(found, wanted)


def test_the_comparison_sees_one_slot() -> None:
    """Negative control."""
    found, wanted = (spoiled(2, 3, 8) for _ in range(2))
    assert same(found, wanted)
    wanted.table[1, 7] = 0
    assert not same(found, wanted)


def start(**changes: Any) -> None:
    out = RoundStart.empty(3, 4, 9)
    in_out = {name: changes.pop(f"out_{name}") for name in RoundStart._fields if f"out_{name}" in changes}
    given: dict[str, Any] = {
        "lengths": torch.tensor([3, 4]),
        "rows": torch.tensor([0, 4]),
        "req_to_token": torch.zeros(5, 9, dtype=torch.int32),
        "rng_keys": torch.zeros(5, dtype=torch.int64),
        "sampling": some_sampling(2),
    }
    round_start.start_round(out._replace(**in_out), **(given | changes))


WRONG = [
    ({"lengths": torch.tensor([3, 4]).int()}, TypeError, "lengths is int32, wanted int64: convert it with .to()"),
    ({"rows": torch.tensor([0])}, ValueError, "rows has shape [1], wanted [2]: pass a tensor of that shape"),
    ({"req_to_token": torch.zeros(5, 9)}, TypeError, "req_to_token is float32, wanted int32"),
    ({"rng_keys": torch.zeros(4).long()}, ValueError, "rng_keys has shape [4], wanted [5]"),
    ({"sampling": some_sampling(3)}, ValueError, "sampling.temperatures has shape [3], wanted [2]"),
    ({"out_table": torch.zeros(3, 9)}, TypeError, "out.table is float32, wanted int32"),
    ({"out_rng_keys": torch.zeros(2).long()}, ValueError, "out.rng_keys has shape [2], wanted [3]"),
    ({"out_sampling": some_sampling(2)}, ValueError, "out.sampling.temperatures has shape [2], wanted [3]"),
    (
        {"lengths": torch.ones(4).long(), "rows": torch.ones(4).long(), "sampling": some_sampling(4)},
        ValueError,
        "lengths has 4 requests, wanted at most 3: out has a place for each",
    ),
    (
        {"req_to_token": torch.zeros(5, 0, dtype=torch.int32)},
        ValueError,
        "req_to_token has shape [5, 0], wanted rows and positions: pass the engine's",
    ),
]
WRONG_VALUES = [
    ({"lengths": torch.tensor([3, -1])}, ValueError, "lengths[1] is -1, wanted 0 or more: it counts committed tokens"),
    ({"rows": torch.tensor([5, 0])}, ValueError, "rows[0] is 5, wanted 0 to 4: req_to_token has a row for each"),
]


def refuse(wrong: tuple[dict[str, Any], type[Exception], str]) -> None:
    changes, error, sentence = wrong
    start()
    with pytest.raises(error) as caught:
        start(**changes)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong[2][:40])
def test_wrong_arguments(path: str, wrong: tuple[dict[str, Any], type[Exception], str]) -> None:
    refuse(wrong)


@pytest.mark.parametrize("wrong", WRONG_VALUES, ids=lambda wrong: wrong[2][:40])
def test_wrong_values(path: str, wrong: tuple[dict[str, Any], type[Exception], str]) -> None:
    refuse(wrong)
