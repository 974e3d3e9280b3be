"""The rows of plain rounds that the head reads later: each once, in order, where its request's blocks are."""

from __future__ import annotations

import pytest
import torch

from eagle_plugin.core.costs import PENDING_TOKENS
from eagle_plugin.engines.vllm import pending
from eagle_plugin.engines.vllm.pending import PendingTokens, PlainRows


def add(kept: PendingTokens, names: str, position: int, slots: int = 8) -> bool:
    """A round in which the requests' tokens tell their names and positions, their slots the names."""
    codes = torch.tensor([ord(name) for name in names])
    rows = PlainRows((codes * 100 + position).int(), torch.full_like(codes, position), codes[:, None] + torch.zeros(3))
    return kept.add(list(names), rows, (codes[:, None] * 1000 + torch.arange(slots)).int())


def test_each_row_is_taken_once_and_in_order() -> None:
    kept = PendingTokens(2)
    for position, names in enumerate(["ab", "ba", "b"], start=4):
        assert not add(kept, names, position)
    found = kept.take(["b", "new", "a"])
    assert found is not None and not len(kept)
    a, b = ord("a"), ord("b")
    assert found.positions.tolist() == [4, 5, 6, 4, 5]
    assert found.tokens.tolist() == [b * 100 + 4, b * 100 + 5, b * 100 + 6, a * 100 + 4, a * 100 + 5]
    assert found.features.tolist() == [[b] * 3] * 3 + [[a] * 3] * 2
    requests, seq_lens, lens, starts = (values.tolist() for values in found.rows)
    assert (requests, seq_lens, lens, starts) == ([0, 1], [7, 6], [3, 2], [0, 3])
    assert kept.take(["a", "b"]) is None


def test_slot_tables_are_those_of_the_last_round() -> None:
    """A request that was left out of later rounds has an older, shorter one."""
    kept = PendingTokens(2)
    add(kept, "ab", 4, slots=5)
    add(kept, "b", 5, slots=7)
    found = kept.take("ab")
    assert found is not None
    a, b = ord("a") * 1000, ord("b") * 1000
    assert found.slot_table.tolist() == [[a + i for i in range(5)] + [0, 0], [b + i for i in range(7)]]


def test_what_is_forgotten_is_not_read_and_others_stay() -> None:
    kept = PendingTokens(2)
    add(kept, "abc", 4)
    kept.forget(["a", "unknown"])
    assert kept.take("a") is None and len(kept) == 2
    found = kept.take("b")
    assert found is not None and found.tokens.tolist() == [ord("b") * 100 + 4] and len(kept) == 1


def test_full_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = PendingTokens(2)
    told = [add(kept, "ab" if position > 2 else "a", position) for position in range(PENDING_TOKENS)]
    assert told == [False] * (PENDING_TOKENS - 1) + [True]
    row = 3 * 4  # bytes of a row's states
    monkeypatch.setattr(pending, "MOST_BYTES", 2 * 5 * row)
    kept = PendingTokens(2)
    assert [add(kept, "a", position) for position in range(5)] == [False] * 4 + [True]
    monkeypatch.setattr(pending, "MOST_BYTES", 0)
    assert add(PendingTokens(2), "a", 1)
