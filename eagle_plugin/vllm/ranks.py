"""What the hosts of vLLM's ranks of tensor parallelism tell each other, and what only rank 0 says."""

from __future__ import annotations

import logging
from typing import Any

from torch import distributed
from vllm.distributed.parallel_state import get_tp_group

from eagle_plugin.runtime.ranks import silenced


def in_any_rank(flag: bool) -> bool:
    """Whether a flag of the host is set in any rank; as `gather_objects`."""
    return any(gather_objects(flag))


def gather_objects(value: Any) -> list[Any]:
    """This host value of every rank, by rank; to be called by all of them. It waits: for start-up only."""
    group = get_tp_group()
    values: list[Any] = [value] * group.world_size
    if group.world_size > 1:
        distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def rank_logger(logger: logging.Logger) -> logging.Logger:
    """This logger in rank 0, a silent one in the others."""
    return logger if get_tp_group().rank_in_group == 0 else silenced(logger)
