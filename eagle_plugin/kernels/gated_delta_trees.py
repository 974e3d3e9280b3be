"""Gated delta nets over draft trees, on the states that an engine keeps: in Triton on a GPU, else in torch.

Both functions read and write the engine's caches by slot; `gated_delta.py` is what they compute.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from eagle_plugin.kernels import gated_delta
from eagle_plugin.kernels.checks import check_all, name_of
from eagle_plugin.kernels.gated_delta import Caches, Left, Net, Places, Projections, TreePlan
from eagle_plugin.kernels.loader import triton_module

__all__ = ["attend_trees", "commit_trees"]


def room_for(rows: int, net: Net, dtype: torch.dtype) -> Left:
    """Memory for what that many nodes of a layer leave, [rows, ...] each; dtype: of its projections."""
    device = net.a_log.device
    channels = 2 * net.key_heads * net.key_dim + net.value_heads * net.value_dim
    return Left(
        torch.zeros(rows, channels, dtype=dtype, device=device),
        torch.zeros(rows, net.value_heads, device=device),
        torch.zeros(rows, net.key_heads, net.key_dim, device=device),
        torch.zeros(rows, net.value_heads, net.value_dim, device=device),
    )


def attend_trees(
    net: Net, nodes: Projections, caches: Caches, places: Places, tree: TreePlan, out: Tensor, room: Left | None = None
) -> Left:
    """One layer over B trees of W nodes; the caches are read. out [B * W, HV, V], in nodes' dtype, is written.

    room: of `room_for` B * W nodes or more; what is returned lies in it. None: in memory of its own. TypeError and
    ValueError name a wrong input; the contents of slots and trees are trusted, as the host would have to wait for them.
    """
    b, width, _ = tree.seen.shape
    _check(net, caches, places, tree)
    dtype, n = name_of(nodes.mixed_qkv.dtype), b * width
    channels = caches.pasts.shape[1]
    check_all(
        ("mixed_qkv", nodes.mixed_qkv, f"{dtype} N C"),
        ("a", nodes.a, f"{name_of(nodes.a.dtype)} N HV"),
        ("b", nodes.b, f"{name_of(nodes.b.dtype)} N HV"),
        ("out", out, f"{dtype} N HV V"),
        N=n, C=channels, HV=net.value_heads, V=net.value_dim,
    )  # fmt: skip
    if (kernels := _triton(out)) is not None:
        left = _within(room_for(n, net, nodes.mixed_qkv.dtype) if room is None else room, b, width)
        kernels.attend_trees(net, nodes, caches, places, tree, out, left)
        return left
    mixed_qkv, a, beta = (x.view(b, width, x.shape[1]) for x in nodes)
    past, state = _before(caches, places)
    found, now = gated_delta.attend(net, mixed_qkv, a, beta, past, state, tree)
    out.copy_(found.flatten(0, 1))
    if room is None:
        return now._replace(inputs=now.inputs.clone())  # all else is new, the inputs are in memory of the caller
    left = _within(room, b, width)
    for kept, values in zip(left, now, strict=True):
        kept.copy_(values)
    return left


def _within(room: Left, b: int, width: int) -> Left:
    """The first b * width rows of it, as of trees."""
    return Left(*(x[: b * width].view(b, width, *x.shape[1:]) for x in room))


def commit_trees(net: Net, caches: Caches, places: Places, left: Left, tree: TreePlan, last: Tensor) -> None:
    """Put what is there after the nodes `last` [B] int64 in place of what was there before the trees.

    left: of `attend_trees`, with the caches as they were then.
    """
    _check(net, caches, places, tree)
    check_all(("last", last, "int64 B"), B=len(places.slots))
    if (kernels := _triton(caches.states)) is not None:
        kernels.commit_trees(net, caches, places, left, tree, last)
        return
    past, state = _before(caches, places)
    caches.states[places.slots] = gated_delta.state_after(state, left, tree, last)
    caches.pasts[places.slots] = gated_delta.past_after(past, left, tree, last)


def _check(net: Net, caches: Caches, places: Places, tree: TreePlan) -> None:
    b, width, _ = tree.seen.shape
    channels = 2 * net.key_heads * net.key_dim + net.value_heads * net.value_dim
    taps = net.weight.shape[1]
    check_all(
        ("pasts", caches.pasts, f"{name_of(caches.pasts.dtype)} slots C past"),
        ("states", caches.states, f"{name_of(caches.states.dtype)} slots HV V K"),
        ("weight", net.weight, f"{name_of(net.weight.dtype)} C taps"),
        ("slots", places.slots, "int64 B"),
        ("windows", tree.windows, "int64 B W taps"),
        C=channels, past=taps - 1, taps=taps, HV=net.value_heads, V=net.value_dim, K=net.key_dim, B=b, W=width,
    )  # fmt: skip


def _before(caches: Caches, places: Places) -> tuple[Tensor, Tensor]:
    """What the requests have before their trees: [B, C, w - 1], [B, HV, V, K]."""
    slots, lengths = places
    past, state = caches.pasts[slots], caches.states[slots]
    if lengths is None:
        return past, state
    known = lengths > 0
    return (
        torch.where(known[:, None, None], past, torch.zeros_like(past)),
        torch.where(known[:, None, None, None], state, torch.zeros_like(state)),
    )


def _triton(like: Tensor) -> ModuleType | None:
    return _triton_kernels() if like.is_cuda else None


def _triton_kernels() -> ModuleType | None:
    return triton_module("triton_gated_delta", "gated delta nets")
