"""Sampling under speculation: C++ on the CPU, CUDA on a GPU, the torch oracles elsewhere.

The functions have the names, shapes and rules of `core.rng`, `core.propose` and `core.verify`. The same uniforms lead
to the same tokens, except where rounding decides. TypeError and ValueError name a wrong input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_plugin.core import propose as proposing
from eagle_plugin.core import rng
from eagle_plugin.core import verify as verifying
from eagle_plugin.core.propose import MAX_TOP_M, SLOT_WEIGHTS, Children, Proposals
from eagle_plugin.core.sampling import Filters, SamplingParams, check_filters
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.checks import check_all, check_sampling, check_values
from eagle_plugin.kernels.loader import function

__all__ = ["Accepted", "Children", "Filters", "Proposals", "SamplingParams"]
__all__ += ["propose", "uniforms", "verify_tree"]


MAX_SAMPLED = 4  # sampled children of a node that the native kernels draw and test; csrc: kMaxSampled
WORKSPACE_SIZE = 7336  # of 8 bytes, per node, that verify_tree's launches leave to each other on CUDA


def uniforms(rng_keys: Tensor, counters: Tensor, stream: int, n: int) -> Tensor:
    """Return n random numbers per request, [b, n] float64; see `core.rng.uniforms`."""
    native = function("uniforms", rng_keys.device.type)
    if native is None:
        check_all(("rng_keys", rng_keys, "int64 b"), ("counters", counters, "int64 b"))
        return rng.uniforms(rng_keys, counters, stream, n)
    out = rng_keys.new_empty(len(rng_keys), n, dtype=torch.float64)
    native(rng_keys, counters, stream, out)
    return out


def propose(
    logp: Tensor,
    index: Tensor,
    params: SamplingParams,
    uniforms: Tensor,
    k: int,
    *,
    first_row: int,
    rows_per_request: int,
    draft_to_target: Tensor | None = None,
    slot_weights: Sequence[float] = SLOT_WEIGHTS,
) -> Children:
    """Return k deterministic children and S sampled ones of each row; see `core.propose.propose`.

    S, the number of slot_weights, is at most 4.
    """
    native = function("propose", logp.device.type)
    if native is None:
        _check_propose(logp, index, params, uniforms, k, rows_per_request, draft_to_target, len(slot_weights))
        return proposing.propose(
            logp,
            index,
            params,
            uniforms,
            k,
            first_row=first_row,
            rows_per_request=rows_per_request,
            draft_to_target=draft_to_target,
            slot_weights=slot_weights,
        )
    rows, top_m = logp.shape
    width = max(k, 0) + len(slot_weights)
    children = Children(
        logp.new_empty(rows, width),
        logp.new_empty(rows, width, dtype=torch.int64),
        logp.new_empty(rows, width, dtype=torch.int32),
        logp.new_empty(rows, top_m, dtype=torch.int64),
        logp.new_empty(rows, top_m),
    )
    native(logp, index, params, uniforms, first_row, rows_per_request, draft_to_target, tuple(slot_weights), *children)
    return children


def verify_tree(
    tree: DraftTree,
    logits: Tensor,
    params: SamplingParams,
    proposals: Proposals,
    uniforms: Tensor,
    max_accept_length: int,
    *,
    filters: Filters = "joint",
) -> Accepted:
    """Return the accepted path of each request, with exactly the target's distribution; see `core.verify.verify_tree`.

    The C++ kernel reads the logits of the nodes that the walk visits and no others. On CUDA four launches read the
    logits of all nodes at the same time, and a fifth one walks. None stores anything of the size of the vocabulary.
    They test at most 4 sampled children per node: the last axis of uniforms is 1 to 5.
    """
    if max_accept_length < 1:
        raise ValueError(f"max_accept_length is {max_accept_length}, wanted at least 1: the bonus token needs a place")
    check_filters(filters)
    native = function("verify_tree", logits.device.type)
    if native is None:
        _check_tree(tree, logits, params, proposals, uniforms, max_accept_length)
        return verifying.verify_tree(tree, logits, params, proposals, uniforms, max_accept_length, filters=filters)
    accepted = accepted_memory(logits, len(tree.tokens), max_accept_length)
    given = (tree.tokens, tree.parents, tree.draws, logits, params, *proposals, uniforms, filters == "chained")
    native(*given, workspace_of(logits), *accepted)
    return accepted


def workspace_of(logits: Tensor) -> Tensor:
    """Memory for what the launches of a walk over logits [N, V] leave to each other."""
    return logits.new_empty(logits.shape[0], 0 if logits.is_cpu else WORKSPACE_SIZE, dtype=torch.int64)


def accepted_memory(logits: Tensor, b: int, max_accept_length: int) -> Accepted:
    """Memory for the paths of b requests, unwritten."""
    return Accepted(
        logits.new_empty(b, max_accept_length, dtype=torch.int32),
        logits.new_empty(b, dtype=torch.int32),
        logits.new_empty(b, max_accept_length, dtype=torch.int64),
    )


# The torch path's checks; those of csrc/bindings/sampling.h. tests/kernels/test_argument_checks.py runs every case on
# both and wants the same sentence.


def _check_params(params: SamplingParams, rows: int) -> None:
    check_sampling(params, "params", rows)
    if not params.temperatures.is_cpu:
        return
    for i, temperature in enumerate(params.temperatures.tolist()):
        if not temperature > 0:
            raise ValueError(
                f"params.temperatures[{i}] is {temperature:g}, wanted above 0: greedy is top_k 1 with temperature 1"
            )
    for i, top_k in enumerate(params.top_ks.tolist()):
        if top_k < 1:
            raise ValueError(f"params.top_ks[{i}] is {top_k}, wanted at least 1: the vocabulary size is off")


def _check_propose(
    logp: Tensor,
    index: Tensor,
    params: SamplingParams,
    uniforms: Tensor,
    k: int,
    rows_per_request: int,
    draft_to_target: Tensor | None,
    num_sampled: int,
) -> None:
    rows, top_m = check_all(("logp", logp, "float32 R M"), ("index", index, "int64 R M")).values()
    _check_params(params, rows)
    if num_sampled > MAX_SAMPLED:
        raise ValueError(
            f"slot_weights has {num_sampled} weights, wanted at most {MAX_SAMPLED}: one per sampled child of a node"
        )
    check_all(("uniforms", uniforms, "float64 R S"), R=rows, S=num_sampled)
    if not 1 <= k <= top_m <= MAX_TOP_M:
        raise ValueError(
            f"k is {k} of a list of {top_m}, wanted 1 <= k <= M <= {MAX_TOP_M}: change k or the number of candidates"
        )
    if rows_per_request < 1:
        raise ValueError(f"rows_per_request is {rows_per_request}, wanted at least 1: it is the batch's rows over b")
    if draft_to_target is not None:
        (last,) = check_all(("draft_to_target", draft_to_target, "int64 D")).values()
        fix = "draft_to_target must hold the whole draft vocabulary"
        check_values("index names draft token {value}", index, 0, last - 1, fix)


def _check_tree(
    tree: DraftTree,
    logits: Tensor,
    params: SamplingParams,
    proposals: Proposals,
    uniforms: Tensor,
    max_accept_length: int,
) -> None:
    b, width = check_all(
        ("tokens", tree.tokens, "int64 b W"), ("parents", tree.parents, "int32 b W"), ("draws", tree.draws, "int32 b W")
    ).values()
    (_, vocabulary) = check_all(("logits", logits, "float32 rows V"), rows=b * width).values()
    _check_params(params, b)
    sizes = check_all(
        ("proposals.tokens", proposals.tokens, "int64 b P M"),
        ("proposals.weights", proposals.weights, "float32 b P M"),
        ("uniforms", uniforms, "float64 b E numbers"),
        b=b,
        E=max_accept_length,
    )
    if width < 1:
        raise ValueError("tokens has 0 nodes per request, wanted at least the root: add node 0")
    if not 1 <= sizes["numbers"] <= MAX_SAMPLED + 1:
        raise ValueError(
            f"uniforms has {sizes['numbers']} numbers per node, wanted 1 to {MAX_SAMPLED + 1}: one for each sampled "
            "child to test and one to draw with"
        )
    if vocabulary < 1:
        raise ValueError(f"logits has a vocabulary of {vocabulary}, wanted 1 to 2^31 - 1: pass the target's logits")
    fix = "pass the proposals that drew this tree"
    check_values("draws names proposal row {value}", tree.draws, -1, sizes["P"] - 1, fix)
