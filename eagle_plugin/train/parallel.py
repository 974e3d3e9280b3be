"""P-EAGLE (arXiv 2602.01469): all depths of a draft in one pass, over sampled rows, so that deep ones cost little.

Slot (a, d) drafts from row a at depth d: depth 0 is the EAGLE-3 row a, a deeper one takes the mask token and the learnt
mask features at position a + d. It attends to the depth-0 rows up to a and to its own chain (a, 0..d), and predicts
token a + 2 + d from what was known at a. A hole in a chain would change the rows after it, so only the ends of chains
are dropped.

Letters in shapes: N rows of a batch, S slots, H hidden size, h query heads, g key-value heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_plugin.heads.peagle import PEagleHead
from eagle_plugin.train.batches import Batch
from eagle_plugin.train.layers import Layer, RotaryTable
from eagle_plugin.train.unroll import fuse, next_hidden


class Slots(NamedTuple):
    """The slots of a batch, document by document, and within one by depth and then by anchor."""

    anchor: Tensor  # [S] int64, row of the batch
    depth: Tensor  # [S] int64


def sample_slots(batch: Batch, weights: Tensor, rate: float, floor: float, generator: torch.Generator) -> Slots:
    """Choose the slots of one training step ("conditional drop-token").

    weights [depths, N] of `weigh_chains`: depth d >= 1 is drafted only where it counts. Depth 0 is kept whole, because
    all slots attend to it. Of the slots of depth d whose chain has survived so far, as many are kept at random as
    max(rate^d, floor) of those that count. rate 1 keeps everything.
    """
    device = batch.ids.device
    alive = torch.ones(len(batch), dtype=torch.bool, device=device)
    anchors = [torch.arange(len(batch), device=device)]
    for depth in range(1, len(weights)):
        counts = weights[depth] > 0
        keep = int(int(counts.sum()) * max(rate**depth, floor))
        rows = (alive & counts).nonzero()[:, 0]
        if keep < len(rows):
            rows = rows[torch.randperm(len(rows), generator=generator)[:keep].to(device)].sort().values
        alive = torch.zeros_like(alive)
        alive[rows] = True
        anchors.append(rows)
    anchor = torch.cat(anchors)
    depths = torch.repeat_interleave(torch.tensor([len(rows) for rows in anchors], device=device))
    order = batch.document[anchor].argsort(stable=True)
    return Slots(anchor[order], depths[order])


def visible_slots(slots: Slots) -> Tensor:
    """Which slots of one document attend to which: [S, S] bool, rows attend to columns."""
    anchor, depth = slots
    earlier = (depth == 0) & (anchor[:, None] >= anchor)
    own_chain = (anchor[:, None] == anchor) & (depth[:, None] >= depth)
    return earlier | own_chain


def draft_parallel(head: PEagleHead, batch: Batch, slots: Slots, dtype: torch.dtype) -> Tensor:
    """The state [S, H] of every slot, as `DraftHead.forward` gives it."""
    assert batch.aux is not None
    anchor, depth = slots
    masked = depth > 0
    tokens = batch.ids[(anchor + 1).clamp(max=len(batch) - 1)].masked_fill(masked, head.mask_token_id)
    # The mask state comes after the real rows, so that one lookup serves both.
    states = torch.cat([fuse(head, batch.aux, dtype), head.mask_state().to(dtype)])
    x = states[anchor.masked_fill(masked, len(batch))]
    layers = [Layer(layer, dtype) for layer in head.layers]
    embedded = layers[0].read_embeddings(F.embedding(tokens, head.embedding).to(dtype))
    table = RotaryTable(head, int(batch.starts.diff().max()) + int(depth.max()) + 1, x)
    rotation = table.at(batch.positions[anchor] + depth)
    spans = torch.searchsorted(batch.document[anchor], torch.arange(len(batch.bounds), device=anchor.device)).tolist()
    blocks = [
        (slice(a, b), visible_slots(Slots(anchor[a:b], depth[a:b])))
        for a, b in zip(spans, spans[1:], strict=False)
        if b > a
    ]

    def look(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for span, visible in blocks:
            queries, keys, values = (part[span].transpose(0, 1)[None] for part in (q, k, v))
            attended = F.scaled_dot_product_attention(queries, keys, values, visible, enable_gqa=True)
            parts.append(attended[0].transpose(0, 1))
        return torch.cat(parts)

    for i, layer in enumerate(layers):
        x = layer(x, embedded if i == 0 else None, rotation, look)
    return next_hidden(head, x)
