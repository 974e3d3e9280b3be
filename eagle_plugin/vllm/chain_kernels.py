"""Compiles attention over chains at start-up: Triton would do it in a step without a graph, while a request waits whose
prompt is short or begins in the prefix cache, or whose tokens the head reads."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from eagle_plugin.core.shape import MAX_WIDTH
from eagle_plugin.kernels.loader import triton_module
from eagle_plugin.runtime.capturing import powers_of_two
from eagle_plugin.runtime.round_costs import has_room
from eagle_plugin.vllm.attention import ExtendRows, TreeAttentionImpl, attend_chains, chains_of
from eagle_plugin.vllm.cache_layout import CacheRows


class Attention(NamedTuple):
    """How a layer attends."""

    layer: Any  # `triton_tiles.Layer`
    dtype: torch.dtype  # of the queries
    cache: CacheRows
    options: dict[str, Any]  # of our kernels

    def kind(self) -> tuple[Any, ...]:
        """Equal for layers that use the same kernels."""
        given = [name for name, value in self.options.items() if value is not None]
        return self.layer, self.dtype, self.cache.keys.dtype, self.options["most_keys"], *given


@torch.inference_mode()
def compile_chains(runner: Any, logger: logging.Logger) -> None:
    """Run every kernel once that chains of a `TreeModelRunner`'s steps use, over padding.

    It needs caches, and only reads the block that vLLM gives to nobody. Where memory ends, the rest is left out; ranks
    may differ in it, because nothing is exchanged here. Nothing is done on a CPU.
    """
    tiles = triton_module("triton_tiles", "tree attention") if runner.device.type == "cuda" else None
    if tiles is None:
        return
    most, begin = runner.max_num_reqs + runner.max_num_tokens // MAX_WIDTH, time.perf_counter()
    calls = [
        partial(_attend_padding, one, b, length)
        for one in _kinds_of(runner, tiles)
        for b, length in _sizes(one, most, tiles)
    ]
    ran = 0
    while ran < len(calls) and has_room(calls[ran]):
        ran += 1
    logger.info(
        "eagle-plugin: attention of eager steps is compiled, %d of %d launches in %.1f s%s",
        ran,
        len(calls),
        time.perf_counter() - begin,
        "" if ran == len(calls) else "; memory ended there, and requests will wait for the others",
    )


def _kinds_of(runner: Any, tiles: Any) -> list[Attention]:
    """One layer of each kind that target and head have."""
    found: dict[tuple[Any, ...], Attention] = {}
    for layer in runner.vllm_config.compilation_config.static_forward_context.values():
        impl = getattr(layer, "impl", None)
        if not isinstance(impl, TreeAttentionImpl) or not layer.kv_cache.numel():
            continue  # without a cache it never attends
        cache, options = impl.rows_of(layer.kv_cache), impl.options(layer, runner.device)
        dtype = cache.keys.dtype if impl.float8 is None else runner.dtype
        heads, dim = (impl.num_heads, impl.num_kv_heads), impl.head_size
        limits = options["window"], options["chunk"], options["logit_cap"] > 0
        one = Attention(tiles.Layer(*heads, dim, dim, dtype.itemsize, *limits), dtype, cache, options)
        found.setdefault(one.kind(), one)
    return list(found.values())


def _sizes(attention: Attention, most: int, tiles: Any) -> Iterator[tuple[int, int]]:
    """Numbers of chains, up to `most`, and lengths of them that use every kernel of a layer."""
    seen: set[Any] = set()
    device = tiles.device_of(attention.cache.keys)
    for length in powers_of_two(MAX_WIDTH):
        for b in range(1, most + 1):
            plan = tiles.plan_for(attention.layer, b, length, attention.options["most_keys"], device)
            if not plan.kernels() <= seen:
                seen |= plan.kernels()
                yield b, length


def _attend_padding(attention: Attention, b: int, length: int) -> None:
    """Attend from b chains after nothing, all of whose keys are row 0 of the cache."""
    device, (heads, _, dim, *_) = attention.cache.keys.device, attention.layer
    nothing = torch.zeros(b, dtype=torch.int64, device=device)
    lens = torch.full_like(nothing, length)
    rows = ExtendRows(nothing, lens, lens, torch.arange(b, device=device) * length)
    table = torch.zeros(1, length, dtype=torch.int32, device=device)
    query = torch.zeros(b * length, heads, dim, dtype=attention.dtype, device=device)
    chains = chains_of(rows, [length] * b, table)
    attend_chains(query, attention.cache, chains, attention.options, torch.empty_like(query))
