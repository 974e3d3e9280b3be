"""Block drafters (DFlash): the context of a batch once, and sampled blocks after its rows.

Row a has the keys and values of token a in every layer. The block of anchor a is the token a + 1 and masks after it, at
the positions of the tokens a + 1, a + 2, ..; it attends to the rows up to a and to itself. Its row d, d >= 1, predicts
token a + 1 + d, which is draft d - 1 of row a in the other objectives.

All rows of a block see each other, so that a block is computed whole or not at all, also past the end of its document.
Only of a causal one the rows that predict nothing are left out.

Letters in shapes: N rows of a batch, S rows of blocks, H hidden size, g key-value heads, D head size.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_plugin.heads.dflash import DFlashHead
from eagle_plugin.learning.train.batches import Batch
from eagle_plugin.learning.train.layers import Layer, RotaryTable, normalise
from eagle_plugin.learning.train.parallel import MaskedRows, SegmentAttention
from eagle_plugin.learning.train.unroll import fuse


def sample_blocks(
    batch: Batch, weights: Tensor, rate: float, most: int, causal: bool, generator: torch.Generator
) -> MaskedRows:
    """Choose the blocks of one training step: at a share `rate` of the rows whose first draft counts.

    weights [steps, N] of `weigh_chains`; most: blocks of a document, 0 for no limit. Depth 0 of a chain is its root.
    """
    steps, device = len(weights), weights.device
    anchors = (weights[0] > 0).nonzero()[:, 0]
    keep = math.ceil(len(anchors) * rate)
    if keep < len(anchors):
        anchors = anchors[torch.randperm(len(anchors), generator=generator)[:keep].sort().values.to(device)]
    if most:
        anchors = _thin(anchors, batch.document[anchors], most, generator)
    anchor = anchors.repeat_interleave(steps + 1)
    depth = torch.arange(steps + 1, device=device).repeat(len(anchors))
    if causal:
        counts = (depth == 0) | (weights[(depth - 1).clamp(min=0), anchor] > 0)
        anchor, depth = anchor[counts], depth[counts]
    return MaskedRows(anchor, depth)


def _thin(anchors: Tensor, document: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """At most `most` of the anchors of each document, drawn at random, in their order."""
    counts = document.bincount()
    if not len(anchors) or int(counts.max()) <= most:
        return anchors
    order = torch.randperm(len(anchors), generator=generator).to(anchors.device)
    order = order[document[order].sort(stable=True).indices]  # document after document, at random in each
    place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[document[order]]
    return anchors[order[place < most].sort().values]


class BlockPass:
    """The forward of one batch: keys and values of its tokens, and the blocks that read them."""

    def __init__(self, head: DFlashHead, batch: Batch, steps: int, dtype: torch.dtype) -> None:
        assert batch.aux is not None
        self.head, self.batch, self.dtype = head, batch, dtype
        self.layers = [Layer(layer, dtype) for layer in head.layers]
        context = normalise(fuse(head, batch.aux, dtype), head.hidden_norm.eps)
        self.table = RotaryTable(head, int(batch.starts.diff().max()) + steps + 1, context)
        rotation = self.table.at(batch.positions)
        self.keys: list[Tensor] = []  # [N, g, D] per layer
        self.values: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            attention = head.block_layer(i).self_attn
            assert attention.k_norm is not None
            weight = torch.cat([attention.k_proj.weight, attention.v_proj.weight]) * head.hidden_norm.weight
            mixed = F.linear(context, weight.to(dtype)).unflatten(-1, (-1, layer.head_dim))
            k, v = mixed.chunk(2, 1)
            self.keys.append(rotation(normalise(k, layer.eps) * attention.k_norm.weight.to(dtype)))
            self.values.append(v)

    def weights(self) -> list[Tensor]:
        """The tensors through which blocks reach the head's parameters, beside `keys` and `values`."""
        return [weight for layer in self.layers for weight in layer.weights()] + [self.head.norm.weight]

    def draft(self, rows: MaskedRows, first: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """The states [S, H] of the rows of whole blocks, as `DFlashHead.forward` gives them.

        keys, values: those of the batch's rows from `first` on, [rows, g, D] per layer, as for `SegmentAttention`.
        """
        head, batch = self.head, self.batch
        whole = not head.causal
        attention = SegmentAttention(head, batch, rows, first, first + len(keys[0]), whole)
        tokens = torch.where(rows.depth == 0, batch.ids[rows.anchor + 1], head.mask_token_id)
        x = F.embedding(tokens, head.embedding).to(self.dtype)
        rotation = self.table.at(batch.positions[rows.anchor] + 1 + rows.depth)
        for i, layer in enumerate(self.layers):
            x = layer(x, None, rotation, partial(attention, keys[i], values[i]))
        return x
