"""Tests the kernels of sampling and of penalties against the oracles of `core`."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core import penalties as penalizing
from eagle_plugin.core import propose as proposing
from eagle_plugin.core import rng
from eagle_plugin.core import verify as verifying
from eagle_plugin.core.gumbel import draw_tokens
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
    keys, positions = trial.randint(-(2**62), 2**62, b * k), trial.randint(0, 2**40, b * k)
    given = logp, index, trial.params(b).for_rows(k), keys, positions, k, to_target
    (scores, tokens), (wanted, wanted_tokens) = (module.propose(*given) for module in (sampling, proposing))
    trial.equal("tokens", tokens, wanted_tokens)
    trial.close("scores", scores, wanted, 1e-5, 1e-5)


def _verify_tree(trial: Trial) -> None:
    """Trees that were drafted from the target's own distribution: paths are accepted."""
    for b in trial.sizes.walked:
        for filters in ("joint", "chained"):
            _verify_tree_with(trial, b, filters)


def _verify_tree_with(trial: Trial, b: int, filters: Filters) -> None:
    shape = trial.model.tree
    tree = trial.tree(b, shape)
    logits, params = trial.randn(b * shape.width, trial.vocabulary) * 2, trial.params(b)
    keys, lengths = trial.randint(-(2**62), 2**62, b), trial.randint(1, 2**20, b)
    # Half of the children are what the target draws after their parents.
    positions = (lengths[:, None] + tree.depths).view(-1)
    drawn = draw_tokens(
        logits, params.for_rows(shape.width), keys.repeat_interleave(shape.width), positions, filters
    ).view(b, -1)
    after = drawn.gather(1, tree.parents.clamp(min=0).long())
    chosen = (trial.rand(b, shape.width) < 0.5) & (tree.parents >= 0)
    tree = tree._replace(tokens=torch.where(chosen, after, tree.tokens))
    given = tree, logits, params, keys, lengths, shape.max_accept_length
    found, wanted = (module.verify_tree(*given, filters=filters) for module in (sampling, verifying))
    for name, x, y in zip(found._fields, found, wanted, strict=True):
        trial.equal(f"{name} of {b} trees ({filters})", x, y)


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
