"""Moves inside the paged cache of keys and values: native on the CPU and on CUDA, torch elsewhere."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from eagle_plugin.core import verify as oracle
from eagle_plugin.kernels.checks import ANY, check
from eagle_plugin.kernels.loader import function

__all__ = ["compact_kv", "store_kv"]


def compact_kv(
    data_ptrs: Tensor, row_bytes: Tensor, window: Tensor, index: Tensor, lengths: Tensor, *, slots: int = 0
) -> None:
    """Move the accepted rows of n caches at once to the front of each request's window, in place.

    data_ptrs [n] int64 (base addresses, uint64 bits) and row_bytes [n] int64 describe the caches (keys and values of
    every layer); window [b, W] int64, index [b, E] int32, lengths [b] int32 as in `core.verify.compact_rows`. All are
    on the caches' device. `slots`, when given, is the number of rows of the smallest cache and every slot is checked
    against it. On the CPU an accepted node outside the window, a length outside 0..min(E, W) or a slot outside the
    cache gives ValueError, and nothing has been moved. On CUDA the nodes of a path must ascend, as those of a tree do,
    and the rows of a path are moved up to its first wrong entry.
    """
    native = function("compact_kv", window.device.type)
    if native is not None:
        native(data_ptrs, row_bytes, window, index, lengths, slots)
    elif window.is_cpu:
        _compact_kv_torch(data_ptrs, row_bytes, window, index, lengths, slots)
    else:
        _compact_kv_cuda(data_ptrs, row_bytes, window, index, lengths, slots)


def store_kv(k_cache: Tensor, v_cache: Tensor, loc: Tensor, k: Tensor, v: Tensor) -> None:
    """Write new keys and values into their slots: k_cache[loc] = k, v_cache[loc] = v.

    k_cache [slots, Hkv, D] and v_cache [slots, Hkv, Dv] of one dtype, loc [N] int64, k [N, Hkv, D] and v [N, Hkv, Dv]
    of the caches' dtype (rows may be slices of a fused projection). When a slot occurs twice the later row wins on the
    CPU, either of them on CUDA. A slot outside the cache gives ValueError on the CPU; on CUDA that row
    is not stored.
    """
    native = function("store_kv", k_cache.device.type)
    if native is not None:
        native(k_cache, v_cache, loc, k, v)
        return
    check(k_cache, "k_cache", k_cache.dtype, (ANY, ANY, ANY))
    slots, heads, _ = k_cache.shape
    check(v_cache, "v_cache", k_cache.dtype, (slots, heads, ANY))
    check(loc, "loc", torch.int64, (ANY,))
    check(k, "k", k_cache.dtype, (loc.shape[0], *k_cache.shape[1:]))
    check(v, "v", k_cache.dtype, (loc.shape[0], *v_cache.shape[1:]))
    if k_cache.is_cpu and loc.numel() and not 0 <= int(loc.min()) <= int(loc.max()) < k_cache.shape[0]:
        bad = next(x for x in loc.tolist() if not 0 <= x < k_cache.shape[0])
        raise ValueError(f"loc names slot {bad}, wanted 0 to {k_cache.shape[0] - 1}: allocate the slot first")
    k_cache[loc] = k
    v_cache[loc] = v


def _compact_kv_torch(
    data_ptrs: Tensor, row_bytes: Tensor, window: Tensor, index: Tensor, lengths: Tensor, slots: int
) -> None:
    check(data_ptrs, "data_ptrs", torch.int64, (ANY,))
    check(row_bytes, "row_bytes", torch.int64, tuple(data_ptrs.shape))
    check(window, "window", torch.int64, (ANY, ANY))
    b, width = window.shape
    check(index, "index", torch.int32, (b, ANY))
    check(lengths, "lengths", torch.int32, (b,))
    moves, longest = [], min(width, index.shape[1])
    for i, length in enumerate(lengths.tolist()):
        if not 0 <= length <= longest:
            raise ValueError(f"lengths[{i}] is {length}, wanted 0 to {longest}: pass the lengths of verify_tree")
        for j, node in enumerate(index[i, :length].tolist()):
            if not 0 <= node < width:
                raise ValueError(f"index[{i}, {j}] is {node}, wanted 0 to {width - 1}: pass the index of verify_tree")
            source, to = int(window[i, node]), int(window[i, j])
            for slot in (source, to):
                if slot < 0 or (slots and slot >= slots):
                    most = f"0 to {slots - 1}" if slots else "0 or more"
                    raise ValueError(f"window of request {i} names slot {slot}, wanted {most}: allocate the slot first")
            moves.append((source, to))
    for base, size in zip(data_ptrs.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at((base + source * size) % 2**64, size) for source, _ in moves]  # read all, then write
        for (_, to), row in zip(moves, rows, strict=True):
            ctypes.memmove((base + to * size) % 2**64, row, size)


def _compact_kv_cuda(
    data_ptrs: Tensor, row_bytes: Tensor, window: Tensor, index: Tensor, lengths: Tensor, slots: int
) -> None:
    if slots < 1:
        raise ValueError("slots is 0, wanted the rows of the smallest cache: pass it, there is no native kernel")
    for base, size in zip(data_ptrs.tolist(), row_bytes.tolist(), strict=True):
        cache = torch.as_tensor(_DeviceBytes(base % 2**64, slots, size), device=window.device)
        oracle.compact_rows(cache, window, index, lengths)


class _DeviceBytes:
    """Rows of bytes at an address of the GPU, for torch to read and write in place."""

    def __init__(self, address: int, rows: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (rows, size),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
