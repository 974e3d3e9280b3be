"""Looked-up branches against the oracle, round after round; wrong arguments of both paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import prop, random_parents
from lookup_cases import copy_of, history_of, lengths_of, random_table, random_text, same_histories, same_tables

from eagle_plugin.core import lookup as oracle
from eagle_plugin.core.tree import CandidateTable, DraftTree, select_tree
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
    rows = torch.randperm(b + 2, generator=gen)[:b]
    texts = [random_text(gen, int(torch.randint(1, 60, (), generator=gen)), alphabet) for _ in range(b + 2)]
    deepest = steps + int(torch.randint(0, 3, (), generator=gen))
    found = history_of(texts, window, deepest)
    wanted = copy_of(found)
    lengths = lengths_of(texts)[rows] if b else torch.zeros(0, dtype=torch.int64)
    roots = torch.randint(0, alphabet, (b,), generator=gen)
    for _ in range(3):
        more = int(torch.randint(steps, deepest + 1, (), generator=gen))
        table, candidates = random_table(gen, b, steps, topk, alphabet, more)
        wanted_table = CandidateTable(*(x.clone() for x in table))
        kernels.look_up(found, table, candidates, rows, lengths, roots)
        oracle.look_up(wanted, wanted_table, candidates, rows, lengths, roots)
        same_tables(table, wanted_table)
        same_histories(found, wanted)
        tree = select_tree(table, roots, min(table.scores.shape[1] + 1, 20))
        longest = deepest + 1
        tokens = torch.randint(0, alphabet, (b, longest), generator=gen)
        copied = torch.rand(b, 1, generator=gen) < 0.7
        tokens[:, :deepest] = torch.where(copied, wanted.path[rows].long(), tokens[:, :deepest])
        accepted = Accepted(
            torch.zeros(b, longest, dtype=torch.int32),
            torch.randint(1, longest + 1, (b,), generator=gen, dtype=torch.int32),
            tokens,
        )
        kernels.append_tokens(found, rows, lengths, accepted, tree)
        oracle.append_tokens(wanted, rows, lengths, accepted, tree)
        same_histories(found, wanted)
        lengths = lengths + accepted.lengths
        roots = tokens.gather(1, accepted.lengths.long()[:, None] - 1)[:, 0]


@prop
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 6))
def test_any_tree_may_be_appended(seed: int, b: int, steps: int) -> None:
    """Padding nodes, several roots' children with one token: what was verified need not be what was looked up."""
    gen = torch.Generator().manual_seed(seed)
    found = history_of([random_text(gen, 40, 2) for _ in range(b)], 32, steps)
    rows, lengths = torch.arange(b), torch.full((b,), 39)
    table, candidates = random_table(gen, b, steps, 2, 2, steps)
    oracle.look_up(found, table, candidates, rows, lengths, torch.ones_like(rows))
    wanted = copy_of(found)
    tree = DraftTree.padding(torch.ones_like(rows), 9)._replace(
        tokens=torch.randint(0, 2, (b, 9), generator=gen), parents=random_parents(b, 9, gen)
    )
    accepted = Accepted(
        torch.zeros(b, 2, dtype=torch.int32),
        torch.randint(1, 3, (b,), generator=gen, dtype=torch.int32),
        torch.randint(0, 2, (b, 2), generator=gen),
    )
    kernels.append_tokens(found, rows, lengths, accepted, tree)
    oracle.append_tokens(wanted, rows, lengths, accepted, tree)
    same_histories(found, wanted)


def arguments(**changes: Any) -> dict[str, Any]:
    table, candidates = random_table(torch.Generator().manual_seed(0), 2, 2, 2, 5, 2)
    given_ones = {
        "history": history_of([[1, 2, 1], [3, 4, 3]], 8, 2),
        "table": table,
        "candidates": candidates,
        "rows": torch.tensor([0, 1]),
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
    tree = DraftTree.padding(torch.ones(2, dtype=torch.int64), 1)
    with pytest.raises(TypeError, match="accepted.lengths is int64, wanted int32"):
        wrong = accepted._replace(lengths=accepted.lengths.long())
        kernels.append_tokens(history, torch.tensor([0, 1]), torch.tensor([2, 2]), wrong, tree)


def test_wrong_values_are_named(path: str) -> None:
    with pytest.raises(ValueError, match=r"rows\[1\] is 2, wanted 0 to 1"):
        kernels.look_up(**arguments(rows=torch.tensor([0, 2])))
    with pytest.raises(ValueError, match=r"prefix_lens\[0\] is -1, wanted 0 or more"):
        kernels.look_up(**arguments(prefix_lens=torch.tensor([-1, 2])))
