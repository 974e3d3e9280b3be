"""Sampling under speculation: C++ on the CPU, CUDA on a GPU, the torch oracles elsewhere.

The functions have the names, shapes and rules of `core.rng`, `core.propose` and `core.verify`. The same keys lead to
the same tokens, except where rounding decides. TypeError and ValueError name a wrong input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core import propose as proposing
from eagle_plugin.core import rng
from eagle_plugin.core import verify as verifying
from eagle_plugin.core.propose import MAX_TOP_M, SHARPNESS
from eagle_plugin.core.sampling import Filters, SamplingParams, check_filters
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.checks import check_all, check_sampling, check_values
from eagle_plugin.kernels.loader import function

__all__ = ["Accepted", "Filters", "SamplingParams"]
__all__ += ["propose", "uniforms", "verify_tree"]

WORKSPACE_SIZE = 7383  # of 8 bytes, per node, that the launches of a walk leave to each other on CUDA


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
    rng_keys: Tensor,
    positions: Tensor,
    k: int,
    draft_to_target: Tensor | None = None,
    sharpness: float = SHARPNESS,
) -> tuple[Tensor, Tensor]:
    """Return the scores [R, k] float32 and tokens [R, k] int64 of the children of each row; see `core.propose`.

    The lists have at most 128 tokens.
    """
    native = function("propose", logp.device.type)
    if native is None:
        _check_propose(logp, index, params, rng_keys, positions, k, draft_to_target)
        return proposing.propose(logp, index, params, rng_keys, positions, k, draft_to_target, sharpness)
    scores, tokens = logp.new_empty(len(logp), max(k, 0)), index.new_empty(len(logp), max(k, 0))
    native(logp, index, params, rng_keys, positions, draft_to_target, sharpness, scores, tokens)
    return scores, tokens


def verify_tree(
    tree: DraftTree,
    logits: Tensor,
    params: SamplingParams,
    rng_keys: Tensor,
    lengths: Tensor,
    max_accept_length: int,
    *,
    filters: Filters = "joint",
) -> Accepted:
    """Return the accepted path of each request, with exactly the target's distribution; see `core.verify.verify_tree`.

    The C++ kernel reads the logits of the nodes that the walk visits and no others. On CUDA four or five launches read
    the logits of all nodes at the same time, and the last one walks. None stores anything of the size of the
    vocabulary.
    """
    if max_accept_length < 1:
        raise ValueError(f"max_accept_length is {max_accept_length}, wanted at least 1: the bonus token needs a place")
    check_filters(filters)
    native = function("verify_tree", logits.device.type)
    if native is None:
        _check_tree(tree, logits, params, rng_keys, lengths)
        return verifying.verify_tree(tree, logits, params, rng_keys, lengths, max_accept_length, filters=filters)
    accepted = accepted_memory(logits, len(tree.tokens), max_accept_length)
    given = (tree.tokens, tree.parents, logits, params, rng_keys, lengths, filters == "chained")
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
    rng_keys: Tensor,
    positions: Tensor,
    k: int,
    draft_to_target: Tensor | None,
) -> None:
    rows, top_m = check_all(("logp", logp, "float32 R M"), ("index", index, "int64 R M")).values()
    if not 1 <= k <= top_m <= MAX_TOP_M:
        raise ValueError(
            f"k is {k} of a list of {top_m}, wanted 1 <= k <= M <= {MAX_TOP_M}: change k or the number of candidates"
        )
    if draft_to_target is not None:
        (last,) = check_all(("draft_to_target", draft_to_target, "int64 D")).values()
        fix = "draft_to_target must hold the whole draft vocabulary"
        check_values("index names draft token {value}", index, 0, last - 1, fix)
    _check_params(params, rows)
    check_all(("rng_keys", rng_keys, "int64 R"), ("positions", positions, "int64 R"), R=rows)


def _check_tree(tree: DraftTree, logits: Tensor, params: SamplingParams, rng_keys: Tensor, lengths: Tensor) -> None:
    b, width = check_all(("tokens", tree.tokens, "int64 b W"), ("parents", tree.parents, "int32 b W")).values()
    (_, vocabulary) = check_all(("logits", logits, "float32 rows V"), rows=b * width).values()
    _check_params(params, b)
    check_all(("rng_keys", rng_keys, "int64 b"), ("lengths", lengths, "int64 b"), b=b)
    if width < 1:
        raise ValueError("tokens has 0 nodes per request, wanted at least the root: add node 0")
    if vocabulary < 1:
        raise ValueError(f"logits has a vocabulary of {vocabulary}, wanted 1 to 2^31 - 1: pass the target's logits")
