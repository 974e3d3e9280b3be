"""Draft trees as first-child / next-sibling links, as SGLang's EAGLE worker has them; C++ or torch, CPU only.

`link_tree` builds the links and `walk_links` is the greedy walk along them: CPU versions of the engine's GPU kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.kernels.checks import ANY, check
from eagle_sglang_cpu.native import function

__all__ = ["link_tree", "walk_links"]


def link_tree(
    parent_list: Tensor,
    selected: Tensor,
    seq_lens: Tensor,
    mask: Tensor,
    positions: Tensor,
    node_index: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    *,
    topk: int,
    depth: int,
) -> None:
    """Write the links, ancestor mask and positions of b draft trees of W nodes chosen from b candidate tables.

    parent_list i64 [b, G]: candidate index of the parent of the g-th group of `topk` candidates, g = 0 is the root's;
    selected i64 [b, W-1]: chosen candidates, ascending; seq_lens i64 [b]. Outputs, in place: mask bool [b*W*W] (row i:
    the root, i and its ancestors), positions i64 [b*W], node_index / first_child / next_sibling i64 [b, W]. Siblings
    are linked in ascending order. A node whose parent was not chosen gets no link, so no walk reaches it. TypeError
    and ValueError name a wrong input. EAGLE-2 (arXiv 2406.16858) section 4.2.
    """
    outputs = (mask, positions, node_index, first_child, next_sibling)
    native = function("link_tree") if mask.is_cpu else None
    if native is not None:
        native(parent_list, selected, seq_lens, *outputs, topk, depth)
        return
    check(node_index, "node_index", torch.int64, (ANY, ANY))
    b, width = node_index.shape
    if width < 1:
        raise ValueError("tree width is 0, wanted at least 1: the root needs a place")
    if topk < 1 or depth < 1:
        raise ValueError(f"topk is {topk} and depth {depth}, wanted at least 1: raise them")
    check(parent_list, "parent_list", torch.int64, (b, ANY))
    check(selected, "selected", torch.int64, (b, width - 1))
    check(seq_lens, "seq_lens", torch.int64, (b,))
    check(mask, "mask", torch.bool, (b * width * width,))
    check(positions, "positions", torch.int64, (b * width,))
    check(first_child, "first_child", torch.int64, (b, width))
    check(next_sibling, "next_sibling", torch.int64, (b, width))
    _link_tree_torch(parent_list, selected, seq_lens, *outputs, topk, depth)


def _link_tree_torch(
    parent_list: Tensor,
    selected: Tensor,
    seq_lens: Tensor,
    mask: Tensor,
    positions: Tensor,
    node_index: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    topk: int,
    depth: int,
) -> None:
    b, width = node_index.shape
    first_child.fill_(-1)
    next_sibling.fill_(-1)
    node_index.copy_(torch.arange(b * width).view(b, width))
    masks, pos = mask.view(b, width, width), positions.view(b, width)
    masks.zero_()
    masks[:, :, 0] = True
    for i in range(b):
        chosen = selected[i].tolist()
        node_of = {candidate: node for node, candidate in reversed(list(enumerate(chosen, start=1)))}
        parents = [-1] * width
        for node, candidate in enumerate(chosen, start=1):
            group = candidate // topk
            parents[node] = 0 if group == 0 else node_of.get(int(parent_list[i, group]), -1)
        for node in range(width - 1, 0, -1):  # downwards: each child goes to the front of its parent's list
            if parents[node] >= 0:
                next_sibling[i, node] = first_child[i, parents[node]]
                first_child[i, parents[node]] = node
        for node in range(width):
            cur, steps = node, 0
            while cur > 0 and steps < depth:
                masks[i, node, cur] = True
                cur, steps = parents[cur], steps + 1
            pos[i, node] = seq_lens[i] + steps


def walk_links(
    predicts: Tensor,
    accept_index: Tensor,
    accept_drafts: Tensor,
    tokens: Tensor,
    node_index: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    targets: Tensor,
) -> None:
    """Follow, in each of b trees, the child equal to the target's choice, and write what was accepted.

    tokens, node_index, first_child, next_sibling, targets i64 [b, W]. Outputs, in place: predicts i32 [b*W] (at each
    accepted node's flat index the token that follows it, so the bonus at the last one), accept_index i32 [b, E] (flat
    indices, the root first; the rest is left as it came), accept_drafts i32 [b] (accepted drafts, without the bonus,
    at most E-1). TypeError and ValueError name a wrong input.
    """
    links = (tokens, node_index, first_child, next_sibling, targets)
    native = function("walk_links") if tokens.is_cpu else None
    if native is not None:
        native(predicts, accept_index, accept_drafts, *links)
        return
    check(tokens, "tokens", torch.int64, (ANY, ANY))
    b, width = tokens.shape
    check(accept_index, "accept_index", torch.int32, (b, ANY))
    if width < 1 or accept_index.shape[1] < 1:
        raise ValueError(
            f"trees have {width} nodes and accept_index {accept_index.shape[1]} columns, wanted at least 1: the root "
            "needs a place"
        )
    check(predicts, "predicts", torch.int32, (b * width,))
    check(accept_drafts, "accept_drafts", torch.int32, (b,))
    check(node_index, "node_index", torch.int64, (b, width))
    check(first_child, "first_child", torch.int64, (b, width))
    check(next_sibling, "next_sibling", torch.int64, (b, width))
    check(targets, "targets", torch.int64, (b, width))
    _walk_links_torch(predicts, accept_index, accept_drafts, *links)


def _walk_links_torch(
    predicts: Tensor,
    accept_index: Tensor,
    accept_drafts: Tensor,
    tokens: Tensor,
    node_index: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    targets: Tensor,
) -> None:
    b, max_accept_length = accept_index.shape
    flat_targets = targets.flatten()
    for i in range(b):
        last = int(node_index[i, 0])
        accept_index[i, 0] = last
        node = accepted = 0
        while accepted < max_accept_length - 1:
            child = int(first_child[i, node])
            while child >= 0 and tokens[i, child] != flat_targets[last]:
                child = int(next_sibling[i, child])
            if child < 0:
                break
            predicts[last] = int(flat_targets[last])
            node, accepted = child, accepted + 1
            last = int(node_index[i, node])
            accept_index[i, accepted] = last
        accept_drafts[i] = accepted
        predicts[last] = int(flat_targets[last])
