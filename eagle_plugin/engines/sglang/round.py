"""The shape of a decode round and the cache slots it works in."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from eagle_plugin.engines.sglang.attention import TreeBatch
from eagle_plugin.engines.sglang.sampling import DRAFT, VERIFY, random_keys, sampling_params
from eagle_plugin.kernels.sampling import SAMPLED, SamplingParams, uniforms


class Shape(NamedTuple):
    """How far and how wide one round speculates."""

    steps: int  # D: depth of the longest path below the root; 0 is plain decoding
    topk: int  # K: children of a node, and rows of a frontier
    width: int  # W: nodes that the target verifies, root included

    @property
    def stride(self) -> int:
        """E: the most tokens that a round of this shape can yield, the bonus token included."""
        return min(self.steps, self.width - 1) + 1

    @property
    def draft_slots(self) -> int:
        """Cache slots behind the committed length that the levels of the draft write."""
        return max(self.steps - 1, 0) * self.topk


PLAIN = Shape(steps=0, topk=1, width=1)


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
        reach = max(shape.width, shape.draft_slots, shape.stride)
        positions = prefix_lens[:, None] + torch.arange(reach)
        slots = req_to_token[rows[:, None], positions].long()
        info = batch.sampling_info
        return cls(shape, prefix_lens, rows, slots, sampling_params(info), info.is_all_greedy, random_keys(batch.reqs))

    def window(self, first: int, count: int) -> torch.Tensor:
        """The slots of `count` positions from L + first on, contiguous [b, count]."""
        # contiguous() alone would keep the gaps of a single column.
        return self.slots[:, first : first + count].clone(memory_format=torch.contiguous_format)

    def draft_numbers(self) -> torch.Tensor:
        """Random numbers for the sampled children of P proposal rows, the root's first; [b, P, S] float64."""
        rows = 1 + self.shape.draft_slots
        return uniforms(self.keys, self.prefix_lens, DRAFT, rows * SAMPLED).view(-1, rows, SAMPLED)

    def verify_numbers(self) -> torch.Tensor:
        """Random numbers for the walk: S tests and a draw at each node of the path; [b, E, S + 1] float64."""
        stride = self.shape.stride
        return uniforms(self.keys, self.prefix_lens, VERIFY, stride * (SAMPLED + 1)).view(-1, stride, SAMPLED + 1)

    def tree_batch(self, ancestors: torch.Tensor, tail: int) -> TreeBatch:
        """What tree attention needs for rows with these ancestor words [b, R] over `tail` slots behind the prefix."""
        return TreeBatch(self.prefix_lens, self.rows, ancestors, tail)
