"""One decode round and the cache slots it works in."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from eagle_plugin.core.shape import Shape
from eagle_plugin.engines import numbers
from eagle_plugin.engines.sglang.attention import TreeBatch
from eagle_plugin.engines.sglang.sampling import random_keys, sampling_params
from eagle_plugin.kernels.sampling import SamplingParams


class Round(NamedTuple):
    """One decode round of b requests; L is a request's committed length (its last token has no KV yet)."""

    shape: Shape
    prefix_lens: torch.Tensor  # [b] int64: L
    rows: torch.Tensor  # [b] int64: row of the request-to-token table
    slots: torch.Tensor  # [b, U] int64: cache slots of the positions L .. L + U - 1
    sampling: SamplingParams  # of b requests
    is_greedy: bool  # all requests take the argmax
    keys: torch.Tensor  # [b] int64: of the requests' random numbers

    @classmethod
    def begin(cls, shape: Shape, batch: Any, req_to_token: torch.Tensor) -> Round:
        """Read the slots of the round once, from an SGLang ``ScheduleBatch`` whose decode slots are allocated."""
        prefix_lens, rows = batch.seq_lens.long(), batch.req_pool_indices.long()
        reach = max(shape.width, shape.draft_slots, shape.max_accept_length)
        positions = prefix_lens[:, None] + torch.arange(reach)
        slots = req_to_token[rows[:, None], positions].long()
        info = batch.sampling_info
        return cls(shape, prefix_lens, rows, slots, sampling_params(info), info.is_all_greedy, random_keys(batch.reqs))

    def window(self, first: int, count: int) -> torch.Tensor:
        """The slots of `count` positions from L + first on, contiguous [b, count]."""
        # contiguous() alone would keep the gaps of a single column.
        return self.slots[:, first : first + count].clone(memory_format=torch.contiguous_format)

    def draft_numbers(self) -> torch.Tensor:
        """Random numbers for the sampled children; see `numbers.draft_numbers`."""
        return numbers.draft_numbers(self.keys, self.prefix_lens, self.shape)

    def verify_numbers(self) -> torch.Tensor:
        """Random numbers for the walk; see `numbers.verify_numbers`."""
        return numbers.verify_numbers(self.keys, self.prefix_lens, self.shape.max_accept_length)

    def tree_batch(self, ancestors: torch.Tensor, tail: int) -> TreeBatch:
        """What tree attention needs for rows with these ancestor words [b, R] over `tail` slots behind the prefix."""
        return TreeBatch(self.prefix_lens, self.rows, ancestors, tail)
