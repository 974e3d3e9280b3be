"""Moves inside the paged cache of keys and values: native on the CPU and on CUDA, torch elsewhere."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from eagle_plugin.core import verify as oracle
from eagle_plugin.kernels.checks import check_all, check_values, name_of
from eagle_plugin.kernels.float8 import FLOAT8, quantised
from eagle_plugin.kernels.loader import function, triton_module

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


def store_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write new keys and values into their slots: k_cache[loc] = k, v_cache[loc] = v.

    k_cache [slots, Hkv, D] and v_cache [slots, Hkv, Dv] of one dtype and with any strides but for a contiguous last
    axis, loc [N] int64, k [N, Hkv, D] and v [N, Hkv, Dv] of the caches' dtype (rows may be slices of a fused
    projection). When a slot occurs twice the later row wins on the
    CPU, either of them on CUDA. A slot outside the cache gives ValueError on the CPU; on CUDA that row
    is not stored.

    A cache may be one of 8-bit floats, float8_e4m3fn or float8_e5m2: k and v of one other float type are then divided
    by k_scale and v_scale [1] float32 (None: 1) and rounded (`float8.quantised`).
    """
    if k_cache.dtype in FLOAT8:
        _store_float8(k_cache, v_cache, loc, k, v, k_scale, v_scale)
        return
    if k_scale is not None or v_scale is not None:
        raise ValueError(f"a cache of {name_of(k_cache.dtype)} has no scales: pass k_scale and v_scale None")
    native = function("store_kv", k_cache.device.type)
    if native is not None:
        native(k_cache, v_cache, loc, k, v)
        return
    dtype = name_of(k_cache.dtype)
    sizes = check_all(
        ("k_cache", k_cache, f"{dtype} slots H D"),
        ("v_cache", v_cache, f"{dtype} slots H Dv"),
        ("loc", loc, "int64 N"),
        ("k", k, f"{dtype} N H D"),
        ("v", v, f"{dtype} N H Dv"),
    )
    check_values("loc names slot {value}", loc, 0, sizes["slots"] - 1, "allocate the slot first")
    k_cache[loc] = k
    v_cache[loc] = v


def _store_float8(
    k_cache: Tensor, v_cache: Tensor, loc: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    stored, given = name_of(k_cache.dtype), name_of(k.dtype)
    check_all(
        ("k_cache", k_cache, f"{stored} slots H D"),
        ("v_cache", v_cache, f"{stored} slots H Dv"),
        ("loc", loc, "int64 N"),
        ("k", k, f"{given} N H D"),
        ("v", v, f"{given} N H Dv"),
    )
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    check_all(*((name, scale, "float32 1") for name, scale in scales.items() if scale is not None))
    launch = _triton() if k_cache.is_cuda else None
    if launch is not None:
        for name, rows in {"k": k, "v": v}.items():
            if len(rows) and not rows[0].is_contiguous():
                raise ValueError(f"{name} has gaps inside its rows, wanted contiguous rows: call .contiguous()")
        for name, cache in {"k_cache": k_cache, "v_cache": v_cache}.items():
            if cache.stride(2) != 1:
                raise ValueError(f"{name} has gaps inside its heads, wanted a contiguous last axis: call .contiguous()")
        if not loc.is_contiguous():
            raise ValueError("loc has gaps between its rows, wanted a contiguous tensor: call .contiguous()")
        launch(k_cache, v_cache, loc, k, v, k_scale, v_scale)
        return
    new = quantised(k, k_scale, k_cache.dtype), quantised(v, v_scale, v_cache.dtype)
    keys, values, k_bytes, v_bytes = (x.view(torch.uint8) for x in (k_cache, v_cache, *new))
    store_kv(keys, values, loc, k_bytes, v_bytes)


def _triton() -> Callable[..., None] | None:
    """The Triton kernel for caches of 8-bit floats; None where the torch path runs."""
    module = triton_module("triton_store", "writes to 8-bit caches")
    return None if module is None else module.store_float8


def _compact_kv_torch(
    data_ptrs: Tensor, row_bytes: Tensor, window: Tensor, index: Tensor, lengths: Tensor, slots: int
) -> None:
    sizes = check_all(
        ("data_ptrs", data_ptrs, "int64 n"),
        ("row_bytes", row_bytes, "int64 n"),
        ("window", window, "int64 b W"),
        ("index", index, "int32 b E"),
        ("lengths", lengths, "int32 b"),
    )
    longest = min(sizes["W"], sizes["E"])
    check_values("lengths[{at}] is {value}", lengths, 0, longest, "pass the lengths of verify_tree")
    nodes = index.where(torch.arange(sizes["E"]) < lengths[:, None], 0)
    check_values("index[{at}] is {value}", nodes, 0, sizes["W"] - 1, "pass the index of verify_tree")
    moves = []
    for i, length in enumerate(lengths.tolist()):
        ends = torch.stack([window[i, nodes[i, :length].long()], window[i, :length]], dim=1)  # [length, 2]: from, to
        last = slots - 1 if slots else None
        check_values(f"window of request {i} names slot {{value}}", ends, 0, last, "allocate the slot first")
        moves += ends.tolist()
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
