"""Chooses the blocks of tree attention in Triton, and into how many stretches a prefix is split."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

__all__ = ["Device", "Tile", "device_of", "split_count", "tile_for"]

# Of the slot table's width, twice as many for wide tiles: merging shorter stretches costs more than they save.
KEYS_PER_SPLIT = 128
MAX_SPLITS = 64


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
        fastest on an H200 (docs/gpu.md), also where some registers are spilled.
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


def split_count(programs: int, width: int, processors: int, tile: Tile) -> int:
    """Return into how many stretches to split a slot table's width, a power of two.

    Two programs per multiprocessor, but one of the widest tile with 8 warps: the more rows, the more partial results
    there are to merge.
    """
    wide = tile.rows > 64
    wanted = (1 if wide and tile.warps == 8 else 2) * processors // max(programs, 1)
    wanted = min(wanted, width // (KEYS_PER_SPLIT * (1 + wide)), MAX_SPLITS)
    return 1 << (max(wanted, 1).bit_length() - 1)
