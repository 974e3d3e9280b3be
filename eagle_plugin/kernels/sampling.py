"""Sampling under speculation: C++ on the CPU, CUDA on a GPU, the torch oracles elsewhere.

The functions have the names, shapes and rules of `core.rng`, `core.propose` and `core.verify`; the same numbers u
lead to the same tokens but for rounding. TypeError and ValueError name a wrong input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core import propose as proposing
from eagle_plugin.core import rng
from eagle_plugin.core import verify as verifying
from eagle_plugin.core.policy import NUM_SAMPLED
from eagle_plugin.core.propose import Children, Proposals
from eagle_plugin.core.sampling import Filters, SamplingParams, check_filters
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.checks import ANY, check
from eagle_plugin.kernels.loader import function

__all__ = ["Accepted", "Children", "Filters", "Proposals", "SamplingParams"]
__all__ += ["propose", "uniforms", "verify_tree"]


def uniforms(keys: Tensor, counters: Tensor, stream: int, n: int) -> Tensor:
    """Return n random numbers a request, [b, n] float64; see `core.rng.uniforms`."""
    native = function("uniforms", keys.device.type)
    if native is None:
        check(keys, "keys", torch.int64, (ANY,))
        check(counters, "counters", torch.int64, tuple(keys.shape))
        return rng.uniforms(keys, counters, stream, n)
    out = keys.new_empty(len(keys), n, dtype=torch.float64)
    native(keys, counters, stream, out)
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
) -> Children:
    """Return k deterministic children and S sampled ones of each row; see `core.propose.propose`."""
    native = function("propose", logp.device.type)
    if native is None:
        check(logp, "logp", torch.float32, (ANY, ANY))
        check(index, "index", torch.int64, tuple(logp.shape))
        _check_params(params, logp.shape[0])
        check(uniforms, "uniforms", torch.float64, (logp.shape[0], NUM_SAMPLED))
        if not 1 <= k <= logp.shape[1]:
            raise ValueError(f"k is {k} of a list of {logp.shape[1]}, wanted 1 <= k <= M <= 128: list more tokens")
        return proposing.propose(
            logp,
            index,
            params,
            uniforms,
            k,
            first_row=first_row,
            rows_per_request=rows_per_request,
            draft_to_target=draft_to_target,
        )
    rows, size = logp.shape
    children = Children(
        logp.new_empty(rows, k + NUM_SAMPLED),
        logp.new_empty(rows, k + NUM_SAMPLED, dtype=torch.int64),
        logp.new_empty(rows, k + NUM_SAMPLED, dtype=torch.int32),
        logp.new_empty(rows, size, dtype=torch.int64),
        logp.new_empty(rows, size),
    )
    native(logp, index, *params, uniforms, first_row, rows_per_request, draft_to_target, *children)
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

    Only the logits of the nodes that the walk visits are read; nothing of the size of the vocabulary is stored. The
    native kernels test at most 4 sampled children a node: N <= 5.
    """
    if max_accept_length < 1:
        raise ValueError(f"max_accept_length is {max_accept_length}, wanted at least 1: the bonus token needs a place")
    check_filters(filters)
    native = function("verify_tree", logits.device.type)
    b = tree.tokens.shape[0]
    if native is None:
        _check_tree(tree, logits, params, proposals, uniforms, max_accept_length)
        return verifying.verify_tree(tree, logits, params, proposals, uniforms, max_accept_length, filters=filters)
    accepted = Accepted(
        logits.new_empty(b, max_accept_length, dtype=torch.int32),
        logits.new_empty(b, dtype=torch.int32),
        logits.new_empty(b, max_accept_length, dtype=torch.int64),
    )
    chained = filters == "chained"
    native(tree.tokens, tree.parents, tree.draws, logits, *params, *proposals, uniforms, chained, *accepted)
    return accepted


def _check_params(params: SamplingParams, rows: int) -> None:
    check(params.temperatures, "params.temperatures", torch.float32, (rows,))
    check(params.top_ks, "params.top_ks", torch.int32, (rows,))
    check(params.top_ps, "params.top_ps", torch.float32, (rows,))
    check(params.min_ps, "params.min_ps", torch.float32, (rows,))


def _check_tree(
    tree: DraftTree,
    logits: Tensor,
    params: SamplingParams,
    proposals: Proposals,
    uniforms: Tensor,
    max_accept_length: int,
) -> None:
    check(tree.tokens, "tokens", torch.int64, (ANY, ANY))
    b, width = tree.tokens.shape
    check(tree.parents, "parents", torch.int32, (b, width))
    check(tree.draws, "draws", torch.int32, (b, width))
    check(logits, "logits", torch.float32, (b * width, ANY))
    _check_params(params, b)
    check(proposals.tokens, "proposals.tokens", torch.int64, (b, ANY, ANY))
    check(proposals.weights, "proposals.weights", torch.float32, tuple(proposals.tokens.shape))
    check(uniforms, "uniforms", torch.float64, (b, max_accept_length, ANY))
