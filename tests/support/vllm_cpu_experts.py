"""Gives vLLM on a CPU what its layers of experts lack where ranks or engines share them: for tests only.

- Its experts do not know which of them a rank has (--enable-expert-parallel), and read beyond their weights.
- Its communicator of a CPU does not exchange the tokens of engines (--data-parallel-size): a method of it is missing.

A worker of vLLM that has `EXTENSION` as its ``worker_extension_cls`` imports this module, which does both.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

EXTENSION = f"{__name__}.Extension"
_healthy: Any = CPUUnquantizedExperts.apply


class Extension:
    """Adds nothing to a worker."""


def apply(self: Any, *, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None, **named: Any) -> None:
    """As vLLM's own, with experts of other ranks that weigh nothing."""
    if expert_map is not None:
        own = expert_map[topk_ids.long()]
        topk_weights, topk_ids = topk_weights.masked_fill(own < 0, 0.0), own.clamp_min(0).to(topk_ids.dtype)
    _healthy(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **named)


def all_gatherv(self: Any, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The rows of all ranks, of which rank i has sizes[i]."""
    if isinstance(input_, list):
        return [all_gatherv(self, one, dim, sizes) for one in input_]
    assert dim == 0 and sizes is not None and len(input_) == sizes[self.rank_in_group]
    given = input_.new_zeros(max(sizes), *input_.shape[1:])
    given[: len(input_)] = input_
    found = [torch.empty_like(given) for _ in sizes]
    distributed.all_gather(found, given, group=self.device_group)
    return torch.cat([rows[:size] for rows, size in zip(found, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
    """This rank's rows of the sum over all ranks."""
    assert dim == 0 and sizes is not None and len(input_) == sum(sizes)
    total = input_.clone()
    distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group].clone()


_ADDED = ((CPUUnquantizedExperts, apply), (CpuCommunicator, all_gatherv), (CpuCommunicator, reduce_scatterv))


def complete(patched: pytest.MonkeyPatch) -> None:
    """Do it in this process too, in which the plugin asks what there is."""
    for owner, function in _ADDED:
        patched.setattr(owner, function.__name__, function)


if multiprocessing.parent_process() is not None:
    complete(pytest.MonkeyPatch())
