"""Tests the kernels over trees and paths (`kernels/tree.py`, `kernels/accepted_path.py`) against the oracles."""

from __future__ import annotations

import torch

from eagle_plugin.core import accepted_path as reading
from eagle_plugin.core import links
from eagle_plugin.core import tree as oracle
from eagle_plugin.core.tree import CandidateTable, Frontier
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels import accepted_path
from eagle_plugin.kernels import tree as kernels
from eagle_plugin.selftest.trial import Check, Trial


def _topk_log_softmax(trial: Trial) -> None:
    rows = trial.sizes.batch * trial.model.topk
    for dtype in dict.fromkeys((torch.float32, trial.dtype)):
        logits = (trial.randn(rows, trial.draft_vocabulary) * 4).to(dtype)
        for k in (trial.model.topk, min(128, trial.draft_vocabulary)):
            found, wanted = kernels.topk_log_softmax(logits, k), oracle.topk_log_softmax(logits, k)
            trial.equal(f"index of {k}", found[1], wanted[1])
            trial.close(f"log p of {k}", found[0], wanted[0], 1e-6, 2e-5)


def _grow_level(trial: Trial) -> None:
    """All levels of a tree."""
    b, shape = trial.sizes.batch, trial.model.tree
    k = shape.topk
    tables = [oracle.new_table(b, k * (1 + shape.draft_slots), trial.device) for _ in range(2)]
    frontiers: list[Frontier | None] = [None, None]
    offset, rows = 0, 1
    for level in range(1, shape.steps + 1):
        logp, tokens = trial.randn(b, rows, k).abs().neg(), trial.randint(0, trial.vocabulary, b, rows, k)
        topk = shape.topk if level < shape.steps else 0
        for i, module in enumerate((kernels, oracle)):
            frontiers[i] = module.grow_level(tables[i], offset, level, logp, tokens, frontiers[i], topk)
        found, wanted = frontiers
        assert found is not None and wanted is not None
        for name, a, b_ in zip(Frontier._fields, found, wanted, strict=True):
            _compare(trial, f"level {level}, {name}", a, b_)
        frontiers = [wanted, wanted]  # a difference is reported once
        offset, rows = offset + rows * k, wanted.tokens.shape[1]
    for name, x, y in zip(CandidateTable._fields, *tables, strict=True):
        _compare(trial, f"table.{name}", x, y)


def _grow_levels(trial: Trial) -> None:
    """All levels at once."""
    b, shape = trial.sizes.batch, trial.model.tree
    k, rows = shape.topk, 1 + shape.draft_slots
    tables = [oracle.new_table(b, k * rows, trial.device) for _ in range(2)]
    logp, tokens = trial.randn(b, rows, k).abs().neg(), trial.randint(0, trial.vocabulary, b, rows, k)
    for module, table in zip((kernels, oracle), tables, strict=True):
        module.grow_levels(table, shape.steps, shape.topk, logp, tokens)
    for name, x, y in zip(CandidateTable._fields, *tables, strict=True):
        _compare(trial, f"table.{name}", x, y)


def _select_tree(trial: Trial) -> None:
    b, shape = trial.sizes.batch, trial.model.tree
    k = shape.topk
    table = oracle.new_table(b, k * (1 + shape.draft_slots), trial.device)
    frontier: Frontier | None = None
    offset, rows = 0, 1
    for level in range(1, shape.steps + 1):
        logp, tokens = trial.randn(b, rows, k).abs().neg(), trial.randint(0, trial.vocabulary, b, rows, k)
        frontier = oracle.grow_level(table, offset, level, logp, tokens, frontier, shape.topk)
        offset, rows = offset + rows * k, frontier.tokens.shape[1]
    roots = trial.randint(0, trial.vocabulary, b)
    found, wanted = (module.select_tree(table, roots, shape.width) for module in (kernels, oracle))
    for name, x, y in zip(found._fields, found, wanted, strict=True):
        trial.equal(name, x, y)


def _sibling_links(trial: Trial) -> None:
    parents = trial.parents(trial.sizes.batch, trial.model.width)
    for name, x, y in zip(
        ("first child", "next sibling"), kernels.sibling_links(parents), links.sibling_links(parents), strict=True
    ):
        trial.equal(name, x, y)


def _compare(trial: Trial, what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    if found.is_floating_point():
        trial.close(what, found, wanted, 1e-6, 1e-6)
    else:
        trial.equal(what, found, wanted)


def _read_path(trial: Trial) -> None:
    b, shape = trial.sizes.batch, trial.model.tree
    longest = shape.max_accept_length
    lengths = trial.randint(1, longest + 1, b).int()
    index = trial.randint(1, shape.width, b, longest).int()
    index[:, 0] = 0
    index = index.where(torch.arange(longest, device=trial.device) < lengths[:, None], -1).contiguous()
    accepted = Accepted(index, lengths, trial.randint(0, trial.vocabulary, b, longest))
    prefixes = trial.randint(0, 5000, b)
    found, wanted = (module.read_path(accepted, prefixes, shape.width) for module in (accepted_path, reading))
    for name, x, y in zip(found._fields, found, wanted, strict=True):
        trial.equal(name, x, y)


CHECKS = (
    Check("topk_log_softmax", _topk_log_softmax),
    Check("grow_level", _grow_level),
    Check("grow_levels", _grow_levels),
    Check("select_tree", _select_tree),
    Check("sibling_links", _sibling_links),
    Check("read_path", _read_path),
)
