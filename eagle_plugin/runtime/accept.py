"""Accepts a path of each tree and moves its cache rows: the second half of a decode round, the same in both engines.

Letters in shapes as in `runtime.round`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.synthetic import SyntheticRates, accept_synthetic, keys_of_trees
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.kv import compact_kv
from eagle_plugin.kernels.sampling import Filters, SamplingParams, verify_tree
from eagle_plugin.runtime.rng import synthetic_uniforms
from eagle_plugin.runtime.round import Drafts


def accept(
    drafts: Drafts,
    logits: Tensor,
    sampling: SamplingParams,
    rng_keys: Tensor | None,
    lengths: Tensor,
    filters: Filters,
    synthetic: SyntheticRates | None = None,
) -> Accepted:
    """Walk each tree so that the accepted tokens have the target's distribution; see `core.verify.verify_tree`.

    logits [b * W, V] float32, row i * W + j after node j of request i, with every transform but temperature and
    filters applied; sampling, rng_keys [b] int64 (None where all requests are greedy) and lengths [b] int64 (L) have
    one row per request. synthetic: for benchmarks; the same work is done, but a path of a drawn length is accepted.
    """
    longest = drafts.shape.max_accept_length
    keys = torch.zeros_like(lengths) if rng_keys is None else rng_keys
    accepted = verify_tree(drafts.tree, logits, sampling, keys, lengths, longest, filters=filters)
    if synthetic is None or longest == 1:
        return accepted
    drawn = synthetic_uniforms(keys_of_trees(drafts.tree) if rng_keys is None else rng_keys, lengths)
    return accept_synthetic(drafts.tree, logits, synthetic.of(drafts.shape), drawn, longest)


def without_spare_places(accepted: Accepted) -> Accepted:
    """The paths without the places that no request reaches, on a CPU, where the head's forward takes time per row.

    On a GPU the paths as they are: their lengths are known on the device only.
    """
    if accepted.lengths.device.type != "cpu":
        return accepted
    longest = max(accepted.lengths.tolist(), default=1)
    index, tokens = (values[:, :longest].contiguous() for values in (accepted.index, accepted.tokens))
    return Accepted(index, accepted.lengths, tokens)


def accepted_rows(accepted: Accepted, width: int) -> Tensor:
    """Row i * W + j of each accepted node, [b, E] int64; places after the accepted path name the root's row."""
    nodes = accepted.index.long().clamp(min=0)
    return nodes + torch.arange(0, len(nodes) * width, width, device=nodes.device)[:, None]


def last_tokens(accepted: Accepted, requests: Tensor) -> Tensor:
    """The last token that the rounds of some requests [k] int64 yielded, [k] int64."""
    ends = (accepted.lengths.long()[requests] - 1).clamp(min=0)
    return accepted.tokens[requests].long().gather(1, ends[:, None])[:, 0]


class KVCaches(NamedTuple):
    """The key and value caches of layers that share their slots."""

    data_ptrs: Tensor  # [n] int64 holding uint64 bits: address of each cache
    row_bytes: Tensor  # [n] int64: bytes from one slot to the next
    slots: int  # of the smallest cache

    def move_accepted(self, window: Tensor, accepted: Accepted) -> None:
        """Move the rows of the accepted nodes to the slots right after L; window [b, W] int64 is each node's slot."""
        compact_kv(self.data_ptrs, self.row_bytes, window, accepted.index, accepted.lengths, slots=self.slots)
