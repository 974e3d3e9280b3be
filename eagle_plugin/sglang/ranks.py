"""What the hosts of SGLang's ranks of tensor parallelism tell each other, and what only rank 0 says."""

from __future__ import annotations

import logging
from typing import Any

from eagle_plugin.runtime.ranks import silenced


def in_any_rank(flag: bool) -> bool:
    """Whether a flag of the host is set in any rank; as `gather_objects`."""
    return any(gather_objects(flag))


def gather_objects(value: Any) -> list[Any]:
    """This host value of every rank, by rank; to be called by all of them. It waits: for start-up only."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    return [value] if group.world_size == 1 else group.all_gather_object(value)  # type: ignore[no-any-return]


def rank_logger(logger: logging.Logger) -> logging.Logger:
    """This logger in rank 0, a silent one in the others."""
    from sglang.srt.runtime_context import get_parallel

    return logger if get_parallel().tp_rank == 0 else silenced(logger)
