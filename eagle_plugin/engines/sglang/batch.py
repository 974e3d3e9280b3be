"""What a decode round reads from SGLang's batch, once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from eagle_plugin.core.shape import Shape
from eagle_plugin.engines.rng import KeyTable
from eagle_plugin.engines.round import TreeRows
from eagle_plugin.engines.sglang.sampling import sampling_params
from eagle_plugin.kernels.sampling import SamplingParams


class RoundBatch(NamedTuple):
    """One decode round of b requests; L is a request's committed length, its root comes after it."""

    shape: Shape
    prefix_lens: torch.Tensor  # [b] int64: L
    requests: torch.Tensor  # [b] int64: row of the request-to-token table
    slots: torch.Tensor  # [b, U] int64: cache slots of the positions L .. L + U - 1
    sampling: SamplingParams  # of b requests
    is_greedy: bool  # all requests take the argmax
    keys: torch.Tensor  # [b] int64: of the requests' random numbers

    @classmethod
    def read(cls, shape: Shape, batch: Any, req_to_token: torch.Tensor, keys: KeyTable) -> RoundBatch:
        """Read an SGLang ``ScheduleBatch`` whose decode slots are allocated."""
        prefix_lens, requests = batch.seq_lens.long(), batch.req_pool_indices.long()
        positions = prefix_lens[:, None] + torch.arange(shape.reach, device=prefix_lens.device)
        slots = req_to_token[requests[:, None], positions].long()
        info = batch.sampling_info
        return cls(shape, prefix_lens, requests, slots, sampling_params(info), info.is_all_greedy, keys.of(requests))

    def window(self, first: int, count: int) -> torch.Tensor:
        """The slots of `count` positions from L + first on, contiguous [b, count]."""
        # contiguous() alone would keep the gaps of a single column.
        return self.slots[:, first : first + count].clone(memory_format=torch.contiguous_format)

    def tree_rows(self, ancestors: torch.Tensor, tail: int) -> TreeRows:
        """Rows with these ancestors [b, R] over `tail` slots after L, for tree attention."""
        return TreeRows(self.requests, self.prefix_lens, ancestors, tail)
