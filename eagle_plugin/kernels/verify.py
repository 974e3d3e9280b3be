"""The greedy walk over a draft tree: native on the CPU and on CUDA, the torch oracle elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core import verify as oracle
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.checks import ANY, check
from eagle_plugin.kernels.loader import function

__all__ = ["Accepted", "verify_greedy"]


def verify_greedy(tokens: Tensor, parents: Tensor, targets: Tensor, max_accept_length: int) -> Accepted:
    """Return the accepted path of each request; shapes and rule as in `core.verify.verify_greedy`.

    TypeError and ValueError name a wrong input.
    """
    if max_accept_length < 1:
        raise ValueError(f"max_accept_length is {max_accept_length}, wanted at least 1: the bonus token needs a place")
    native = function("verify_greedy", tokens.device.type)
    if native is None:
        check(tokens, "tokens", torch.int64, (ANY, ANY))
        check(parents, "parents", torch.int32, tuple(tokens.shape))
        check(targets, "targets", torch.int64, tuple(tokens.shape))
        if tokens.shape[1] < 1:
            raise ValueError("tokens has 0 nodes per request, wanted at least the root: add node 0")
        return oracle.verify_greedy(tokens, parents, targets, max_accept_length)
    b = tokens.shape[0]
    accepted = Accepted(
        tokens.new_empty(b, max_accept_length, dtype=torch.int32),
        tokens.new_empty(b, dtype=torch.int32),
        tokens.new_empty(b, max_accept_length),
    )
    native(tokens, parents, targets, *accepted)
    return accepted
