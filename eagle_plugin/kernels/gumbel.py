"""Drafts and draws that share their noise: C++ on the CPU, CUDA on a GPU, `core.gumbel` elsewhere.

The same keys lead to the same tokens, except where rounding decides. TypeError and ValueError name a wrong input.
"""

from __future__ import annotations

from torch import Tensor

from eagle_plugin.core import gumbel
from eagle_plugin.core.gumbel import SHARPNESS
from eagle_plugin.core.sampling import Filters, SamplingParams, check_filters
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.checks import check_all, check_sampling
from eagle_plugin.kernels.loader import function
from eagle_plugin.kernels.sampling import accepted_memory, workspace_of

__all__ = ["propose_coupled", "verify_coupled"]


def propose_coupled(
    logp: Tensor,
    index: Tensor,
    params: SamplingParams,
    rng_keys: Tensor,
    positions: Tensor,
    k: int,
    draft_to_target: Tensor | None = None,
    sharpness: float = SHARPNESS,
) -> tuple[Tensor, Tensor]:
    """Return the scores [R, k] float32 and tokens [R, k] int64 of the children of each row; see `core.gumbel`.

    The lists have at most 128 tokens.
    """
    native = function("propose_coupled", logp.device.type)
    if native is None:
        check_all(
            ("logp", logp, "float32 R M"), ("index", index, "int64 R M"),
            ("rng_keys", rng_keys, "int64 R"), ("positions", positions, "int64 R"),
        )  # fmt: skip
        check_sampling(params, "params", len(logp))
        return gumbel.propose_coupled(logp, index, params, rng_keys, positions, k, draft_to_target, sharpness)
    scores, tokens = logp.new_empty(len(logp), k), index.new_empty(len(logp), k)
    native(logp, index, params, rng_keys, positions, draft_to_target, sharpness, scores, tokens)
    return scores, tokens


def verify_coupled(
    tree: DraftTree,
    logits: Tensor,
    params: SamplingParams,
    rng_keys: Tensor,
    lengths: Tensor,
    max_accept_length: int,
    *,
    filters: Filters = "joint",
) -> Accepted:
    """Return the accepted path of each request, with exactly the target's distribution; see `core.gumbel`.

    Launches are those of `kernels.sampling.verify_tree`.
    """
    check_filters(filters)
    native = function("verify_coupled", logits.device.type)
    if native is None:
        b, width = tree.tokens.shape
        check_all(
            ("logits", logits, "float32 rows V"), ("rng_keys", rng_keys, "int64 b"), ("lengths", lengths, "int64 b"),
            rows=b * width, b=b,
        )  # fmt: skip
        check_sampling(params, "params", b)
        return gumbel.verify_coupled(tree, logits, params, rng_keys, lengths, max_accept_length, filters=filters)
    accepted = accepted_memory(logits, len(lengths), max_accept_length)
    given = (tree.tokens, tree.parents, logits, params, rng_keys, lengths, filters == "chained")
    native(*given, workspace_of(logits), *accepted)
    return accepted
