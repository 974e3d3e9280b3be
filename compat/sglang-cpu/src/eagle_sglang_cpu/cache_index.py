"""Slots of a paged cache: reading and writing the slot table, and copying rows between slots; C++ or torch, CPU only.

b = requests, P = rows of the slot table, S = positions in a row. TypeError and ValueError name a wrong input.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from eagle_plugin.kernels.checks import ANY, check
from eagle_sglang_cpu.native import function

__all__ = ["branch_slot_table", "copy_rows", "gather_accepted_slots", "read_slots", "rotate_ids", "write_slots"]


def write_slots(slot_table: Tensor, rows: Tensor, start: Tensor, end: Tensor, slots: Tensor) -> None:
    """Store `slots`, request after request, in slot_table[rows[i], start[i]:end[i]].

    slot_table [P, S] int32; rows, start, end [b] int64; slots [N] int64 with N >= sum(end - start).
    """
    native = function("write_slots")
    if native is not None:
        native(slot_table, rows, start, end, slots)
        return
    row, column = _entries(slot_table, rows, start, end, slots)
    slot_table[row, column] = slots[: row.numel()].to(torch.int32)


def read_slots(slot_table: Tensor, rows: Tensor, start: Tensor, end: Tensor, slots: Tensor) -> None:
    """Fill `slots`, request after request, with slot_table[rows[i], start[i]:end[i]].

    slot_table [P, S] int32; rows, start, end [b] int64; slots [N] int64 with N >= sum(end - start), in place.
    """
    native = function("read_slots")
    if native is not None:
        native(slot_table, rows, start, end, slots)
        return
    row, column = _entries(slot_table, rows, start, end, slots)
    slots[: row.numel()] = slot_table[row, column].to(torch.int64)


def branch_slot_table(slot_table: Tensor, rows: Tensor, seq_lens: Tensor, *, topk: int, steps: int) -> Tensor:
    """Return [b*topk, S'] int32: for each beam slot of each request the prefix and that beam slot's own draft slots.

    The `steps` draft slots of beam slot k are at positions L + k*steps .. L + (k+1)*steps of the request's row and go
    to L .. L+steps. S' = max(L) + steps; entries of a row after L + steps are undefined. slot_table [P, S]
    int32; rows, seq_lens [b] int64.
    """
    longest = int(seq_lens.max()) if seq_lens.numel() else 0
    out = torch.empty((rows.shape[0] * topk, longest + steps), dtype=torch.int32)
    native = function("branch_slot_table")
    if native is not None:
        native(slot_table, rows, seq_lens, out, topk, steps)
        return out
    b = rows.shape[0]
    _check_rows(slot_table, rows)
    check(seq_lens, "seq_lens", torch.int64, (b,))
    if longest + topk * steps > slot_table.shape[1]:
        raise ValueError(
            f"{topk} x {steps} draft slots after {longest} tokens leave the slot table of {slot_table.shape[1]} "
            "positions: lower the number of steps or topk"
        )
    at = torch.arange(longest + steps)
    for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        for k in range(topk):
            position = torch.where(at < length, at, at + k * steps)[: length + steps]
            out[i * topk + k, : length + steps] = slot_table[row, position]
    return out


def gather_accepted_slots(index: Tensor, slots: Tensor, out: Tensor) -> None:
    """Write slots[index[j]] for every index[j] >= 0, in order and without gaps, to the front of `out`.

    index [n] int32, negative where nothing was accepted; slots [m] int64; out int64, as long as the number accepted or
    longer, in place.
    """
    native = function("gather_accepted_slots")
    if native is not None:
        native(index, slots, out)
        return
    check(index, "index", torch.int32, (ANY,))
    check(slots, "slots", torch.int64, (ANY,))
    check(out, "out", torch.int64, (ANY,))
    kept = index[index >= 0].to(torch.int64)
    if kept.numel() > out.numel() or (kept >= slots.numel()).any():
        raise ValueError(
            f"{kept.numel()} accepted indices up to {int(kept.max())} do not fit {slots.numel()} slots and "
            f"{out.numel()} places: check the verify step's shapes"
        )
    out[: kept.numel()] = slots[kept]


def rotate_ids(ids: Tensor, start: Tensor, lens: Tensor, last: Tensor, at: Tensor) -> None:
    """Shift each request's ids left by one, then set ids[at[i]] to its new token.

    ids [T] int64, in place; start, lens, last, at [b] int64. A request of length 0 is not changed.
    """
    native = function("rotate_ids")
    if native is not None:
        native(ids, start, lens, last, at)
        return
    check(ids, "ids", torch.int64, (ANY,))
    check(start, "start", torch.int64, (ANY,))
    for name, tensor in (("lens", lens), ("last", last), ("at", at)):
        check(tensor, name, torch.int64, (start.shape[0],))
    requests = zip(start.tolist(), lens.tolist(), last.tolist(), at.tolist(), strict=True)
    for i, (first, length, token, to) in enumerate(requests):
        if length <= 0:
            continue
        if first < 0 or first + length > ids.numel() or not 0 <= to < ids.numel():
            raise ValueError(
                f"request {i} covers ids {first} to {first + length} and sets {to}, wanted inside {ids.numel()} ids: "
                "check start, lens and at"
            )
        ids[first : first + length - 1] = ids[first + 1 : first + length].clone()
        ids[to] = token


def copy_rows(data_ptrs: Tensor, row_bytes: Tensor, to: Tensor, source: Tensor) -> None:
    """Copy row source[j] to row to[j] in each of n CPU caches given by address; all sources are read before any store.

    data_ptrs [n] int64 (base addresses, uint64 bits) and row_bytes [n] int64 describe the caches; to, source [m] int64.
    The addresses and slots are not checked: the caller must pass valid ones.
    """
    native = function("copy_rows")
    if native is not None:
        native(data_ptrs, row_bytes, to, source)
        return
    check(data_ptrs, "data_ptrs", torch.int64, (ANY,))
    check(row_bytes, "row_bytes", torch.int64, tuple(data_ptrs.shape))
    check(to, "to", torch.int64, (ANY,))
    check(source, "source", torch.int64, tuple(to.shape))
    targets, sources = to.tolist(), source.tolist()
    for base, size in zip(data_ptrs.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at((base + slot * size) % 2**64, size) for slot in sources]
        for slot, row in zip(targets, rows, strict=True):
            ctypes.memmove((base + slot * size) % 2**64, row, size)


def _check_rows(slot_table: Tensor, rows: Tensor) -> None:
    check(slot_table, "slot_table", torch.int32, (ANY, ANY))
    check(rows, "rows", torch.int64, (ANY,))
    if ((rows < 0) | (rows >= slot_table.shape[0])).any():
        raise ValueError(f"rows are {rows.tolist()}, wanted 0 to {slot_table.shape[0] - 1}: check the requests' rows")


def _entries(slot_table: Tensor, rows: Tensor, start: Tensor, end: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Table row and position of every entry of the ranges, one request after the other, all checked."""
    _check_rows(slot_table, rows)
    check(start, "start", torch.int64, tuple(rows.shape))
    check(end, "end", torch.int64, tuple(rows.shape))
    check(slots, "slots", torch.int64, (ANY,))
    lens = end - start
    if ((start < 0) | (lens < 0) | (end > slot_table.shape[1])).any():
        raise ValueError(
            f"ranges are {start.tolist()} to {end.tolist()}, wanted inside a row of {slot_table.shape[1]} slots: check "
            "start and end"
        )
    if int(lens.sum()) > slots.numel():
        raise ValueError(
            f"slots holds {slots.numel()}, wanted at least {int(lens.sum())}, the sum of the ranges: make it larger"
        )
    first = torch.repeat_interleave(start - (lens.cumsum(0) - lens), lens)
    return torch.repeat_interleave(rows, lens), first + torch.arange(first.numel())
