"""Gives the hosts of SGLang's ranks of tensor parallelism what they tell each other, over the engine's group."""

from __future__ import annotations

from typing import Any

from eagle_plugin.runtime.ranks import HostRanks


def _group() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group


_HOSTS = HostRanks(_group)
gather_objects, in_any_rank, rank_logger = _HOSTS.gather, _HOSTS.any, _HOSTS.logger
