"""Looked-up branches against the oracle, round after round; wrong arguments of both paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import prop
from lookup_cases import copy_of, history_of, lengths_of, random_table, random_text, same_histories, same_tables

from eagle_plugin.core import lookup as oracle
from eagle_plugin.core.tree import CandidateTable
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels import lookup as kernels


@prop
@given(
    st.integers(0, 2**31),
    st.integers(0, 4),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([1, 2, 3, 12]),
    st.sampled_from([2, 5, 32, 64]),
)
def test_rounds_are_the_oracles(seed: int, b: int, steps: int, topk: int, alphabet: int, window: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    rows = torch.randperm(b + 2, generator=gen)[:b]  # row 0 among them now and then
    sequences = [random_text(gen, int(torch.randint(1, 60, (), generator=gen)), alphabet) for _ in range(b + 1)]
    deepest = steps + int(torch.randint(0, 3, (), generator=gen))
    found = history_of(sequences, window, deepest)
    wanted = copy_of(found)
    lengths = lengths_of([[0, 0], *sequences])[rows]
    roots = torch.randint(0, alphabet, (b,), generator=gen)
    for _ in range(3):
        more = int(torch.randint(steps, deepest + 1, (), generator=gen))
        table, candidates = random_table(gen, b, steps, topk, alphabet, more)
        wanted_table = CandidateTable(*(x.clone() for x in table))
        width = int(torch.randint(1, table.scores.shape[1] + 3, (), generator=gen))
        kernels.look_up(found, table, candidates, width, rows, lengths, roots)
        oracle.look_up(wanted, wanted_table, candidates, width, rows, lengths, roots)
        same_tables(table, wanted_table)
        same_histories(found, wanted)
        longest = deepest + 1
        tokens = torch.randint(0, alphabet, (b, longest), generator=gen)
        copied = torch.rand(b, 1, generator=gen) < 0.7
        tokens[:, :deepest] = torch.where(copied, wanted.path[rows].long(), tokens[:, :deepest])
        accepted = Accepted(
            torch.zeros(b, longest, dtype=torch.int32),
            torch.randint(1, longest + 1, (b,), generator=gen, dtype=torch.int32),
            tokens,
        )
        kernels.append_tokens(found, rows, lengths, accepted)
        oracle.append_tokens(wanted, rows, lengths, accepted)
        same_histories(found, wanted)
        lengths = lengths + accepted.lengths
        roots = tokens.gather(1, accepted.lengths.long()[:, None] - 1)[:, 0]


def arguments(**changes: Any) -> dict[str, Any]:
    table, candidates = random_table(torch.Generator().manual_seed(0), 2, 2, 2, 5, 2)
    given_ones = {
        "history": history_of([[1, 2, 1], [3, 4, 3]], 8, 2),
        "table": table,
        "candidates": candidates,
        "width": 4,
        "rows": torch.tensor([1, 2]),
        "prefix_lens": torch.tensor([2, 2]),
        "roots": torch.tensor([1, 3]),
    }
    return given_ones | changes


def test_wrong_arguments_are_named(path: str) -> None:
    history = history_of([[1, 2, 1], [3, 4, 3]], 8, 2)
    with pytest.raises(TypeError, match="history.tokens is int64, wanted int32"):
        kernels.look_up(**arguments(history=history._replace(tokens=history.tokens.long())))
    with pytest.raises(ValueError, match="roots has shape"):
        kernels.look_up(**arguments(roots=torch.tensor([1])))
    with pytest.raises(ValueError, match="table holds 8 candidates, 5 of the head, wanted 1 to 2 more"):
        kernels.look_up(**arguments(candidates=5))
    accepted = Accepted(torch.zeros(2, 1).int(), torch.ones(2).int(), torch.ones(2, 1).long())
    with pytest.raises(TypeError, match="accepted.lengths is int64, wanted int32"):
        wrong = accepted._replace(lengths=accepted.lengths.long())
        kernels.append_tokens(history, torch.tensor([1, 2]), torch.tensor([2, 2]), wrong)


def test_wrong_values_are_named(path: str) -> None:
    with pytest.raises(ValueError, match=r"rows\[1\] is 3, wanted 0 to 2"):
        kernels.look_up(**arguments(rows=torch.tensor([0, 3])))
    with pytest.raises(ValueError, match=r"prefix_lens\[0\] is -1, wanted 0 or more"):
        kernels.look_up(**arguments(prefix_lens=torch.tensor([-1, 2])))
