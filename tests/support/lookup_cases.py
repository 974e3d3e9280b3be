"""Random histories and candidate tables, for the tests of looked-up branches."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core.lookup import CELLS, TokenHistory
from eagle_plugin.core.tree import CandidateTable, Frontier, grow_level, new_table

PRIOR = torch.linspace(0.1, 0.9, CELLS)


def history_of(sequences: list[list[int]], window: int, steps: int) -> TokenHistory:
    """The histories of these sequences, in the rows from 1 on; -1 is a token that matches nothing."""
    history = TokenHistory.empty(1 + len(sequences), window, steps, PRIOR)
    for row, text in enumerate(sequences, start=1):
        for position in range(max(len(text) - window, 0), len(text)):
            history.tokens[row, position % window] = text[position]
        history.begins[row], history.ends[row] = max(len(text) - window, 0), len(text) - 1
    return history


def copy_of(history: TokenHistory) -> TokenHistory:
    """In memory of its own."""
    return TokenHistory(*(values.clone() for values in history))


def random_text(gen: torch.Generator, length: int, alphabet: int) -> list[int]:
    """Tokens of a small alphabet: they repeat themselves; a few match nothing."""
    text = torch.randint(0, alphabet, (length,), generator=gen)
    unknown = torch.rand(length, generator=gen) < 0.02
    return [int(x) for x in torch.where(unknown, -1, text)]


def random_table(
    gen: torch.Generator, b: int, steps: int, topk: int, alphabet: int, more: int
) -> tuple[CandidateTable, int]:
    """The candidates that a head could have proposed, with different tokens for siblings; and how many there are.

    The table has `more` further places, which hold nonsense.
    """
    k = min(topk, alphabet)
    candidates = k + (steps - 1) * k * k
    table = new_table(b, candidates + more)
    frontier: Frontier | None = None
    offset, rows = 0, 1
    for level in range(1, steps + 1):
        raw = torch.randn(b, rows, alphabet, generator=gen) * 3
        logp, tokens = raw.log_softmax(-1).topk(k)
        logp = torch.where(torch.rand(logp.shape, generator=gen) < 0.05, -torch.inf, logp).sort(descending=True)[0]
        frontier = grow_level(table, offset, level, logp, tokens, frontier, k if level < steps else 0)
        offset, rows = offset + rows * k, frontier.tokens.shape[1]
    for values in table:
        values[:, candidates:] = 7
    return table, candidates


def same_tables(found: CandidateTable, wanted: CandidateTable) -> None:
    """Equal but for the rounding of exp and log."""
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.parents, wanted.parents)
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-5, atol=1e-5)


def same_histories(found: TokenHistory, wanted: TokenHistory) -> None:
    """The same."""
    for name, x, y in zip(found._fields, found, wanted, strict=True):
        assert x.dtype == y.dtype, name
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def lengths_of(sequences: list[list[int]]) -> Tensor:
    """L of each text, whose last token is the root."""
    return torch.tensor([len(text) - 1 for text in sequences])
