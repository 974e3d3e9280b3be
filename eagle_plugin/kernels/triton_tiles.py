"""Chooses the blocks of tree attention in Triton, and into how many stretches a prefix is split."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "Device",
    "Layer",
    "Plan",
    "Splits",
    "Tile",
    "device_of",
    "plan_for",
    "splits_for",
    "tile_for",
    "used_splits",
]

# Twice as many for wide tiles: merging shorter stretches costs more than they save.
KEYS_PER_SPLIT = 128
MAX_SPLITS = 64
LONGEST = 4096  # keys of a stretch in a batch that fills the GPU: its partial result is some percent of what it reads
MOST_BYTES = 2**27  # of partial results of such batches; their denominators come on top, 1 number per head_dim
# Programs per multiprocessor that such batches get, or two per request and tile of a key head where that is more: one
# that finds no work still takes a place on a multiprocessor while it reads a length.
LAUNCHED = 16
# Programs per multiprocessor that merge one head of a row each; if there were more, each merges several: in a large
# batch most rows have one stretch, and a program that returns at once costs a launch all the same.
MERGES = 16
MERGED_TOGETHER = 8


class Tile(NamedTuple):
    """The block sizes of a launch, all powers of two."""

    rows: int  # query rows of a program
    keys: int  # keys of a step
    warps: int
    stages: int  # key blocks in flight


def tile_for(rows: int, dim: int, itemsize: int, hopper: bool) -> Tile:
    """Return the blocks for `rows` query rows that share a key head, for the larger head_dim of keys and values.

    They fit in the registers and in 99 KB of shared memory, the smallest limit per block of any GPU since sm_80.
    float32 runs on plain FMA units (tensor cores would round it to TF32), whose tiles are smaller.

    hopper: the GPU is an sm_90 and the layer has no window, chunks or cap of logits. Of 30 tiles, those for it were the
        fastest on an H200 (docs/gpu-measurements.md), also where some registers are spilled.
    """
    dim = triton.next_power_of_2(dim)
    block = max(16, triton.next_power_of_2(rows))
    if itemsize == 4:
        return Tile(rows=min(block, 32 if dim <= 128 else 16), keys=32 if dim <= 64 else 16, warps=8, stages=3)
    block = min(block, 128 if dim <= 128 else 64)
    if hopper and dim == 128 and block != 64:
        return Tile(block, keys=128, warps=4, stages=3) if block < 64 else Tile(block, keys=64, warps=4, stages=2)
    keys = 32 if dim > 128 or block > 64 else 64
    return Tile(rows=block, keys=keys, warps=8 if block * dim > 8192 else 4, stages=3)


class Device(NamedTuple):
    """What the blocks of a launch depend on."""

    processors: int
    hopper: bool


INTERPRETED = Device(processors=1, hopper=False)  # Triton's interpreter runs on CPU tensors


def device_of(tensor: Tensor) -> Device:
    """Return that of a tensor."""
    return _device(tensor.device.index) if tensor.is_cuda else INTERPRETED


@functools.cache
def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(properties.multi_processor_count, properties.major == 9)


class Splits(NamedTuple):
    """Into how many stretches the prefixes of a launch are split; the device decides by their lengths."""

    most: int  # a power of two: the programs that are launched per request and tile of a key head
    even: int  # where all requests are equally long
    least: int  # keys of a stretch, where `even` alone decides
    longest: int  # keys of a stretch, as far as `most` allows


def splits_for(programs: int, width: int, processors: int, tile: Tile, part_bytes: int) -> Splits:
    """Return how a launch over a slot table of this width splits its prefixes.

    Two programs per multiprocessor are wanted for requests of one length, but one of the widest tile with 8 warps: the
    more rows, the more partial results there are to merge. Where a batch fills the GPU without splits, a prefix longer
    than `LONGEST` is split all the same, or one program would read it alone when all others have ended. The table is as
    wide as the longest context that is served, and most requests are far shorter: `LAUNCHED` bounds the programs that
    find no work.

    part_bytes: partial results of one stretch of all requests, float32; most * part_bytes is at most `MOST_BYTES`, but
        for the splits that fill the GPU, whose results have at most the rows of the programs that are wanted.
    """
    wide = tile.rows > 64
    least = KEYS_PER_SPLIT * (1 + wide)
    wanted = (1 if wide and tile.warps == 8 else 2) * processors // max(programs, 1)
    even = _power_of_two(min(wanted, width // least, MAX_SPLITS))
    launched = max(LAUNCHED * processors // max(programs, 1), 2)
    most = _power_of_two(min(width // LONGEST, MOST_BYTES // max(part_bytes, 1), MAX_SPLITS, launched))
    return Splits(max(even, most), even, least, LONGEST)


def _power_of_two(n: int) -> int:
    """The largest one up to n, at least 1."""
    return 1 << (max(n, 1).bit_length() - 1)


class Layer(NamedTuple):
    """What the blocks and the splits of an attention layer depend on."""

    heads: int
    kv_heads: int
    dim: int  # the larger head_dim of keys and values
    dim_v: int
    itemsize: int  # of the queries
    window: int  # keys before the query; -1: no window
    chunk: int  # 0: no chunks
    capped: bool  # logits have a cap


class Plan(NamedTuple):
    """How a launch is made up."""

    tile: Tile
    programs: int  # per request and stretch
    splits: Splits
    together: int  # heads that a program of the merge takes

    def kernels(self) -> set[tuple[object, ...]]:
        """What of it is constant in the kernels of a layer that it uses: that of attention, and the merge."""
        if self.splits.most == 1:
            return {(self.tile, False)}
        return {(self.tile, True), (self.splits.most, self.together)}


def plan_for(layer: Layer, b: int, nodes: int, most_keys: int, device: Device) -> Plan:
    """Return how attention from b requests of so many nodes to prefixes of up to `most_keys` keys is launched."""
    rows = nodes * (layer.heads // layer.kv_heads)
    hopper = device.hopper and layer.window < 0 and layer.chunk == 0 and not layer.capped
    tile = tile_for(rows, layer.dim, layer.itemsize, hopper)
    programs = layer.kv_heads * triton.cdiv(rows, tile.rows)
    # No row sees more keys of a prefix than a window or a chunk.
    limits = [*([layer.window] if layer.window >= 0 else []), *([layer.chunk] if layer.chunk > 0 else [])]
    part_bytes = 4 * b * nodes * layer.heads * layer.dim_v
    splits = splits_for(b * programs, min([most_keys, *limits]), device.processors, tile, part_bytes)
    together = 1 if b * nodes * layer.heads <= MERGES * device.processors else MERGED_TOGETHER
    return Plan(tile, programs, splits, together)


@triton.jit
def used_splits(
    prefix, window, chunk, even, least, longest, splits, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr
):  # fmt: skip
    """How many of a launch's splits a request uses, 1 to `splits`; no row sees more keys than a window or a chunk."""
    keys = prefix
    if WINDOWED:
        keys = tl.minimum(keys, window)
    if CHUNKED:
        keys = tl.minimum(keys, chunk)
    used = tl.maximum(tl.minimum(tl.cdiv(keys, least), even), tl.cdiv(keys, longest))
    return tl.minimum(tl.maximum(used, 1), splits)
