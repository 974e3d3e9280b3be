"""Tests the kernels of `kernels/sampling.py` and `kernels/penalties.py` against the oracles of `core`."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core import penalties as penalizing
from eagle_plugin.core import propose as proposing
from eagle_plugin.core import rng
from eagle_plugin.core import verify as verifying
from eagle_plugin.core.propose import NUM_SAMPLED, SLOT_WEIGHTS, Proposals
from eagle_plugin.core.sampling import Filters
from eagle_plugin.kernels import penalties, sampling
from eagle_plugin.kernels.penalties import Penalties
from eagle_plugin.selftest.trial import Check, Trial


def _uniforms(trial: Trial) -> None:
    b = trial.sizes.batch
    keys = trial.randint(-(2**62), 2**62, b)
    counters = trial.randint(0, 2**40, b)
    for stream in range(3):
        trial.equal(
            f"stream {stream}",
            sampling.uniforms(keys, counters, stream, 37).view(torch.int64),
            rng.uniforms(keys, counters, stream, 37).view(torch.int64),
        )


def _propose(trial: Trial) -> None:
    b, k = trial.sizes.batch, trial.model.topk
    top_m = min(128, trial.draft_vocabulary)
    logits = trial.randn(b * k, trial.draft_vocabulary) * 2
    logp, index = logits.log_softmax(dim=1).topk(top_m)
    to_target = trial.permutation(trial.vocabulary)[: trial.draft_vocabulary].contiguous()
    params = trial.params(b).for_rows(k)
    u = trial.rand(b * k, NUM_SAMPLED, dtype=torch.float64)
    found, wanted = (
        function(
            logp, index, params, u, k, first_row=1, rows_per_request=k, draft_to_target=to_target,
            slot_weights=SLOT_WEIGHTS,
        )
        for function in (sampling.propose, proposing.propose)
    )  # fmt: skip
    for name in ("tokens", "draws", "q_tokens"):
        trial.equal(name, getattr(found, name), getattr(wanted, name))
    trial.close("log p", found.logp, wanted.logp, 1e-5, 1e-5)
    trial.close("q weights", found.q_weights, wanted.q_weights, 1e-5, 1e-6)


def _verify_tree(trial: Trial) -> None:
    """Trees of which every node has sampled children, for targets that like them: paths are accepted."""
    for filters in ("joint", "chained"):
        _verify_tree_with(trial, filters)


def _verify_tree_with(trial: Trial, filters: Filters) -> None:
    b, shape = trial.sizes.batch, trial.model.tree
    tree = trial.tree(b, shape)
    rows, top_m = shape.width, min(128, trial.vocabulary)
    # Proposal row j of a request is that of its node j; a node is drawn from the row of its parent, or deterministic.
    q_tokens = _distinct(trial, b * rows, top_m).view(b, rows, top_m)
    q_weights = trial.rand(b, rows, top_m).softmax(dim=2)
    own = tree.parents.clamp(min=0).long()
    place = torch.arange(shape.width, device=trial.device).expand(b, -1) % top_m  # siblings are different tokens
    drawn = q_tokens.gather(1, own[:, :, None].expand(-1, -1, top_m)).gather(2, place[:, :, None])[:, :, 0]
    sampled = (trial.rand(b, shape.width) < 0.5) & (tree.parents >= 0)
    tokens = torch.where(tree.parents >= 0, drawn, tree.tokens)
    tree = tree._replace(tokens=tokens, draws=torch.where(sampled, own, -1).int())
    logits = (trial.randn(b * shape.width, trial.vocabulary) * 2).view(b, shape.width, -1)
    likes = (4 + 4 * trial.rand(b, shape.width)).masked_fill(tree.parents < 0, 0.0)
    logits.view(b, -1).scatter_add_(1, own * trial.vocabulary + tokens, likes)
    longest = shape.max_accept_length
    u = trial.rand(b, longest, NUM_SAMPLED + 1, dtype=torch.float64)
    arguments = (tree, logits.view(-1, trial.vocabulary), trial.params(b), Proposals(q_tokens, q_weights), u, longest)
    found, wanted = (
        function(*arguments, filters=filters) for function in (sampling.verify_tree, verifying.verify_tree)
    )
    for name, x, y in zip(found._fields, found, wanted, strict=True):
        trial.equal(f"{name} ({filters})", x, y)


def _distinct(trial: Trial, rows: int, n: int) -> Tensor:
    """Different tokens per row, ascending, [rows, n] int64: one of each of n stretches of the vocabulary."""
    stretch = trial.vocabulary // n
    first = torch.arange(n, device=trial.device) * stretch
    return first + (trial.rand(rows, n) * stretch).long().clamp(max=stretch - 1)


def _penalties(trial: Trial) -> tuple[Penalties, Tensor]:
    """Tables of more rows than requests, and the rows of the requests; the first request has no penalties."""
    b, size = trial.sizes.batch, trial.sizes.batch + 3
    rows = trial.permutation(size)[:b].contiguous()
    made = Penalties(
        (trial.randint(0, 40, size, trial.vocabulary) - 37).clamp(min=0).int(),
        trial.rand(size),
        trial.rand(size),
        0.5 + trial.rand(size),
        trial.randint(-1, trial.vocabulary, size, 3),
        trial.randint(0, 60, size),
    )
    off = rows[:1]
    made.frequency[off], made.presence[off], made.repetition[off], made.min_lens[off] = 0.0, 0.0, 1.0, 0
    return made, rows


def _penalize_nodes(trial: Trial) -> None:
    b, shape = trial.sizes.batch, trial.model.tree
    tree = trial.tree(b, shape)
    table, rows = _penalties(trial)
    lengths = trial.randint(1, 60, b)
    found = trial.randn(b * shape.width, trial.vocabulary) * 3
    wanted = found.clone()
    for logits, module in ((found, penalties), (wanted, penalizing)):
        module.penalize_nodes(logits, tree.tokens, tree.ancestors, tree.depths, rows, lengths, table)
    trial.close("logits", found, wanted, 1e-6, 1e-6)


def _count_tokens(trial: Trial) -> None:
    b, longest = trial.sizes.batch, trial.model.tree.max_accept_length
    table, rows = _penalties(trial)
    tokens = trial.randint(0, trial.vocabulary, b, longest)
    lengths = trial.randint(1, longest + 1, b).int()
    found, wanted = table.counts.clone(), table.counts.clone()
    for counts, module in ((found, penalties), (wanted, penalizing)):
        module.count_tokens(counts, rows, tokens, lengths)
    trial.equal("counts", found, wanted)


CHECKS = (
    Check("uniforms", _uniforms),
    Check("propose", _propose, rounding_decides=True),
    Check("verify_tree", _verify_tree, rounding_decides=True),
    Check("penalize_nodes", _penalize_nodes),
    Check("count_tokens", _count_tokens),
)
