"""Gated delta nets over draft trees on a GPU, in Triton.

A layer takes two launches over the trees and two after the walk. The state of a head is read once by the programs that
share it, each of which has some of its columns of values, and is written once after the walk.

The triangular system of `gated_delta.py` is solved by u = wanted - mixed u, again and again from u = wanted: a node is
right once all nodes above it are, so as many steps as the deepest node has ancestors are enough, and each is one
product. A node's last step reads nothing but what is right, so the result is that of substitution.

All products and sums are float32 (`ieee`): states go on through thousands of tokens. No launch depends on what is in a
tensor, so that a CUDA graph can have it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_plugin.kernels.gated_delta import Caches, Left, Net, Places, Projections, TreePlan

__all__ = ["attend_trees", "commit_trees"]

CHANNELS = 256  # of a program that convolves
KEYS = 16  # of a step over the columns of keys
VALUES = 32  # columns of values of a program that adds a path to states


@triton.jit(do_not_specialize=["width"])
def _convolve(
    x_ptr, past_ptr, weight_ptr, bias_ptr, slots_ptr, lengths_ptr, windows_ptr, inputs_ptr, mixed_ptr,
    x_row_stride, past_slot_stride, past_channel_step, past_tap_step, weight_channel_step, width,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    """Grid (nodes, blocks of channels): silu of the convolution into `mixed`, and a copy of what a node brings."""
    node = tl.program_id(0).to(tl.int64)
    tree = node // width
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = c < CHANNELS
    past_ptr += tl.load(slots_ptr + tree) * past_slot_stride
    known = valid
    if LENGTHS:
        known = valid & (tl.load(lengths_ptr + tree) > 0)
    total = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        total = tl.load(bias_ptr + c, mask=valid, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        row = tl.load(windows_ptr + node * TAPS + tap)
        in_tree = row >= TAPS - 1
        own_ptr = x_ptr + (tree * width + row - (TAPS - 1)) * x_row_stride + c
        own = tl.load(own_ptr, mask=valid & in_tree, other=0.0)
        before = tl.load(
            past_ptr + c * past_channel_step + row * past_tap_step, mask=known & (row < TAPS - 1), other=0.0
        )
        value = tl.where(in_tree, own, before.to(own.dtype)).to(tl.float32)
        weight = tl.load(weight_ptr + c * weight_channel_step + tap, mask=valid, other=0.0).to(tl.float32)
        total += value * weight
    at = node * CHANNELS + c
    tl.store(mixed_ptr + at, (total * tl.sigmoid(total)).to(mixed_ptr.dtype.element_ty), mask=valid)
    tl.store(inputs_ptr + at, tl.load(x_ptr + node * x_row_stride + c, mask=valid, other=0.0), mask=valid)


@triton.jit(do_not_specialize=["width"])
def _delta_rule(
    mixed_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, state_ptr, slots_ptr, lengths_ptr, seen_ptr,
    out_ptr, decays_ptr, keys_ptr, updates_ptr,
    a_row_step, b_row_step, state_slot_stride, state_head_stride, state_value_stride, width, scale,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    """Grid (trees, value heads, blocks of values): what each node reads, and what it leaves."""
    tree = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key_head = head // (HV // HK)
    w = tl.arange(0, BLOCK_W)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    valid, valid_v = w < width, v < V
    node = tree * width + w
    both = valid[:, None] & valid_v[None, :]
    known = valid_v
    if LENGTHS:
        known = valid_v & (tl.load(lengths_ptr + tree) > 0)

    channels = 2 * HK * K + HV * V
    q_ptr = mixed_ptr + node * channels + key_head * K
    k_ptr = q_ptr + HK * K
    s_ptr = state_ptr + tl.load(slots_ptr + tree) * state_slot_stride + head * state_head_stride
    kk = tl.zeros([BLOCK_W, BLOCK_W], tl.float32)
    qk = tl.zeros([BLOCK_W, BLOCK_W], tl.float32)
    ks = tl.zeros([BLOCK_W, BLOCK_V], tl.float32)
    qs = tl.zeros([BLOCK_W, BLOCK_V], tl.float32)
    k_squares = tl.zeros([BLOCK_W], tl.float32)
    q_squares = tl.zeros([BLOCK_W], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=1):
        d = start + tl.arange(0, BLOCK_K)
        valid_d = d < K
        mask = valid[:, None] & valid_d[None, :]
        q = tl.load(q_ptr[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        k = tl.load(k_ptr[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        s_at = s_ptr + v[None, :] * state_value_stride + d[:, None]
        s = tl.load(s_at, mask=known[None, :] & valid_d[:, None], other=0.0).to(tl.float32)
        k_squares += tl.sum(k * k, 1)
        q_squares += tl.sum(q * q, 1)
        k_t = tl.trans(k)
        kk = tl.dot(k, k_t, kk, input_precision="ieee")
        qk = tl.dot(q, k_t, qk, input_precision="ieee")
        ks = tl.dot(k, s, ks, input_precision="ieee")
        qs = tl.dot(q, s, qs, input_precision="ieee")
    k_unit = 1.0 / tl.sqrt(k_squares + 1e-6)
    q_unit = scale / tl.sqrt(q_squares + 1e-6)

    seen = tl.load(seen_ptr + node[:, None] * width + w[None, :], mask=valid[:, None] & valid[None, :], other=0) != 0
    rise = tl.load(a_ptr + node * a_row_step + head, mask=valid, other=0.0).to(tl.float32)
    rise += tl.load(dt_bias_ptr + head).to(tl.float32)
    rise = tl.where(rise > 20.0, rise, tl.log(1.0 + tl.exp(tl.minimum(rise, 20.0))))  # softplus
    log_decay = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32)) * rise
    beta = tl.sigmoid(tl.load(b_ptr + node * b_row_step + head, mask=valid, other=0.0).to(tl.float32))
    decays = tl.sum(tl.where(seen, log_decay[None, :], 0.0), 1)
    # Only differences down a path count, which are not positive.
    fade = tl.exp(tl.where(seen, decays[:, None] - decays[None, :], float("-inf")))
    grown = tl.exp(decays)

    above = w[:, None] != w[None, :]
    mixed = tl.where(above, kk * fade * (beta * k_unit)[:, None] * k_unit[None, :], 0.0)
    value = tl.load(mixed_ptr + node[:, None] * channels + 2 * HK * K + head * V + v[None, :], mask=both, other=0.0)
    wanted = beta[:, None] * (value.to(tl.float32) - (grown * k_unit)[:, None] * ks)
    u = wanted
    for _ in tl.range(1, tl.max(tl.sum(seen.to(tl.int32), 1), 0), num_stages=1):
        u = wanted - tl.dot(mixed, u, input_precision="ieee")
    read = qk * fade * q_unit[:, None] * k_unit[None, :]
    out = tl.dot(read, u, (grown * q_unit)[:, None] * qs, input_precision="ieee")

    at = (node * HV + head)[:, None] * V + v[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=both)
    tl.store(updates_ptr + at, u, mask=both)
    if tl.program_id(2) == 0:
        tl.store(decays_ptr + node * HV + head, decays, mask=valid)
        if head % (HV // HK) == 0:
            for start in tl.range(0, K, BLOCK_K, num_stages=1):
                d = start + tl.arange(0, BLOCK_K)
                mask = valid[:, None] & (d < K)[None, :]
                k = tl.load(k_ptr[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
                key_at = (node * HK + key_head)[:, None] * K + d[None, :]
                tl.store(keys_ptr + key_at, k * k_unit[:, None], mask=mask)


@triton.jit(do_not_specialize=["width"])
def _commit_states(
    state_ptr, slots_ptr, lengths_ptr, seen_ptr, last_ptr, decays_ptr, keys_ptr, updates_ptr,
    state_slot_stride, state_head_stride, state_value_stride, width,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    """Grid (trees, value heads, blocks of values): add the nodes of the accepted path, one after another."""
    tree = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, BLOCK_K)
    valid = (v < V)[:, None] & (d < K)[None, :]
    known = valid
    if LENGTHS:
        known = valid & (tl.load(lengths_ptr + tree) > 0)
    first = tree * width
    last = tl.load(last_ptr + tree)
    seen_ptr += (first + last) * width
    total = tl.load(decays_ptr + (first + last) * HV + head)
    s_ptr = state_ptr + tl.load(slots_ptr + tree) * state_slot_stride + head * state_head_stride
    s_at = s_ptr + v[:, None] * state_value_stride + d[None, :]
    state = tl.load(s_at, mask=known, other=0.0).to(tl.float32) * tl.exp(total)
    for j in tl.range(0, last + 1, num_stages=1):
        if tl.load(seen_ptr + j) != 0:
            node = first + j
            fade = tl.exp(total - tl.load(decays_ptr + node * HV + head))
            update = tl.load(updates_ptr + (node * HV + head) * V + v, mask=v < V, other=0.0) * fade
            key = tl.load(keys_ptr + (node * HK + head // (HV // HK)) * K + d, mask=d < K, other=0.0)
            state += update[:, None] * key[None, :]
    tl.store(s_at, state.to(state_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["width"])
def _commit_pasts(
    past_ptr, inputs_ptr, slots_ptr, lengths_ptr, windows_ptr, last_ptr,
    past_slot_stride, past_channel_step, past_tap_step, width,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    """Grid (trees, blocks of channels): what the convolution reads after the last node, in place."""
    tree = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    t = tl.arange(0, BLOCK_T)[None, :]
    valid = (c < CHANNELS) & (t < TAPS - 1)
    node = tree * width + tl.load(last_ptr + tree)
    row = tl.load(windows_ptr + node * TAPS + t + 1, mask=t < TAPS - 1, other=0)
    in_tree = row >= TAPS - 1
    known = valid & (row < TAPS - 1)
    if LENGTHS:
        known = known & (tl.load(lengths_ptr + tree) > 0)
    past_ptr += tl.load(slots_ptr + tree) * past_slot_stride
    brought = (tree * width + row - (TAPS - 1)) * CHANNELS + c
    own = tl.load(inputs_ptr + brought, mask=valid & in_tree, other=0.0)
    before = tl.load(past_ptr + c * past_channel_step + row * past_tap_step, mask=known, other=0.0)
    value = tl.where(in_tree, own, before.to(own.dtype))
    tl.debug_barrier()  # what one thread reads another one writes
    at = past_ptr + c * past_channel_step + t * past_tap_step
    tl.store(at, value.to(past_ptr.dtype.element_ty), mask=valid)


def attend_trees(
    net: Net, nodes: Projections, caches: Caches, places: Places, tree: TreePlan, out: Tensor, left: Left
) -> None:
    """What `gated_delta_trees.attend_trees` promises; shapes are checked there. left [B, W, ...] is written.

    ValueError names a tensor with gaps inside its rows.
    """
    b, width, _ = tree.seen.shape
    for name, tensor in {**nodes._asdict(), "states": caches.states, "weight": net.weight}.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has gaps inside its rows, wanted contiguous rows: call .contiguous()")
    _require_dense(places, tree, left, out=out, a_log=net.a_log, dt_bias=net.dt_bias, bias=net.bias)
    if not b:
        return
    channels, taps = net.weight.shape
    mixed = torch.empty_like(left.inputs)
    values, warps = tile_for(width)
    has_lengths = places.lengths is not None
    with torch.cuda.device_of(out):
        _convolve[(b * width, triton.cdiv(channels, CHANNELS))](
            nodes.mixed_qkv, caches.pasts, net.weight, net.bias, *places, tree.windows, left.inputs, mixed,
            nodes.mixed_qkv.stride(0), *caches.pasts.stride(), net.weight.stride(0), width,
            CHANNELS=channels, TAPS=taps, BLOCK=CHANNELS, BIAS=net.bias is not None, LENGTHS=has_lengths,
        )  # fmt: skip
        _delta_rule[(b, net.value_heads, triton.cdiv(net.value_dim, values))](
            mixed, nodes.a, nodes.b, net.a_log, net.dt_bias, caches.states, *places, tree.seen.view(torch.uint8),
            out, left.decays, left.keys, left.updates,
            nodes.a.stride(0), nodes.b.stride(0), *caches.states.stride()[:3], width, net.key_dim**-0.5,
            HK=net.key_heads, HV=net.value_heads, K=net.key_dim, V=net.value_dim,
            BLOCK_W=_power_of_two(width), BLOCK_K=KEYS, BLOCK_V=values, LENGTHS=has_lengths,
            num_warps=warps,
        )  # fmt: skip


def commit_trees(net: Net, caches: Caches, places: Places, left: Left, tree: TreePlan, last: Tensor) -> None:
    """What `gated_delta_trees.commit_trees` promises; shapes are checked there."""
    b, width, _ = tree.seen.shape
    _require_dense(places, tree, left, last=last)
    if not b:
        return
    channels, taps = net.weight.shape
    has_lengths = places.lengths is not None
    with torch.cuda.device_of(last):
        _commit_states[(b, net.value_heads, triton.cdiv(net.value_dim, VALUES))](
            caches.states, *places, tree.seen.view(torch.uint8), last, left.decays, left.keys, left.updates,
            *caches.states.stride()[:3], width,
            HK=net.key_heads, HV=net.value_heads, K=net.key_dim, V=net.value_dim,
            BLOCK_K=_power_of_two(net.key_dim), BLOCK_V=VALUES, LENGTHS=has_lengths,
        )  # fmt: skip
        _commit_pasts[(b, triton.cdiv(channels, CHANNELS))](
            caches.pasts, left.inputs, *places, tree.windows, last, *caches.pasts.stride(), width,
            CHANNELS=channels, TAPS=taps, BLOCK=CHANNELS, BLOCK_T=triton.next_power_of_2(taps - 1), LENGTHS=has_lengths,
        )  # fmt: skip


def _require_dense(places: Places, tree: TreePlan, left: Left, **others: Tensor | None) -> None:
    for name, tensor in {**places._asdict(), **tree._asdict(), **left._asdict(), **others}.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has gaps between its rows, wanted a contiguous tensor: call .contiguous()")


def tile_for(width: int) -> tuple[int, int]:
    """Return columns of values and warps of a program over so many nodes: what fits in the registers of an sm_80."""
    return (32, 4) if width <= 32 else (16, 8)


def _power_of_two(size: int) -> int:
    return max(16, triton.next_power_of_2(size))  # a product has blocks of 16 at least
