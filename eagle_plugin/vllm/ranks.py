"""Gives the hosts of vLLM's ranks of tensor parallelism what they tell each other, over the engine's group."""

from __future__ import annotations

from vllm.distributed.parallel_state import get_tp_group

from eagle_plugin.runtime.ranks import HostRanks

_HOSTS = HostRanks(get_tp_group)
gather_objects, in_any_rank, rank_logger = _HOSTS.gather, _HOSTS.any, _HOSTS.logger
