"""What vLLM's ranks that step together tell each other: those of tensor parallelism, and of a target with experts those
of all engines of a server (data parallelism), because its layers of experts exchange tokens in every forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_world_group

from eagle_plugin.runtime.ranks import HostRanks

_HOSTS = HostRanks(get_world_group)
gather_objects, in_any_rank, rank_logger = _HOSTS.gather, _HOSTS.any, _HOSTS.logger


def ranks_in_step() -> int:
    """How many ranks step together."""
    return int(get_world_group().world_size)


def blocks_in_every_rank(runner: Any) -> int:
    """How many blocks the KV cache of a `TreeModelRunner` has, and that of every rank which steps with it: the ranks of
    one engine have the same number, engines may have different ones. To be called by all, before the first request."""
    blocks = int(runner.kv_cache_config.num_blocks)
    return blocks if runner.vllm_config.parallel_config.data_parallel_size == 1 else min(gather_objects(blocks))


def tokens_of_engines(parallel_config: Any, tokens: int) -> Tensor | None:
    """What a forward without experts tells vLLM's context of it in place of the tokens of all engines [engines] int32.

    Without this the context asks the other engines, which may run no such forward: they draft other trees, or none.
    None: with one engine nobody is asked.
    """
    engines = parallel_config.data_parallel_size
    return torch.full((engines,), tokens, dtype=torch.int32) if engines > 1 else None
