"""P-EAGLE (arXiv 2602.01469): the verified rows of a batch once, and masked rows after them for the deeper drafts.

Row a drafts the token a + 2 as in EAGLE-3 (depth 0). The masked row (a, d), d >= 1, reads the mask token and the learnt
mask features at position a + d, attends to the verified rows up to a and to its own chain (a, 1..d), and predicts token
a + 2 + d from what was known at a. A hole in a chain would change the rows after it, so only the ends of chains are
dropped.

No verified row attends to a masked one. So the verified rows are computed once, and the chains in portions of any size
(`learning.train.segments`) that read their keys and values.

Letters in shapes: N rows of a batch, S masked rows, H hidden size, h query heads, g key-value heads, D head size.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.peagle import PEagleHead
from eagle_plugin.learning.train.attention import Packing, attend
from eagle_plugin.learning.train.batches import Batch
from eagle_plugin.learning.train.layers import Layer, RotaryTable
from eagle_plugin.learning.train.unroll import fuse, next_hidden


class MaskedRows(NamedTuple):
    """Masked rows, chain by chain in the order of the batch, and within a chain by depth."""

    anchor: Tensor  # [S] int64, row of the batch
    depth: Tensor  # [S] int64, 1 or more


def sample_masked_rows(
    batch: Batch, weights: Tensor, rate: float, floor: float, generator: torch.Generator
) -> MaskedRows:
    """Choose the masked rows of one training step ("conditional drop-token").

    weights [depths, N] of `weigh_chains`: depth d is drafted only where it counts. Of the rows of depth d whose chain
    has survived so far, as many are kept at random as max(rate^d, floor) of those that count. rate 1 keeps everything.
    """
    device = batch.ids.device
    alive = torch.ones(len(batch), dtype=torch.bool, device=device)
    anchors = [torch.empty(0, dtype=torch.int64, device=device)]
    for depth in range(1, len(weights)):
        counts = weights[depth] > 0
        keep = int(int(counts.sum()) * max(rate**depth, floor))
        rows = (alive & counts).nonzero()[:, 0]
        if keep < len(rows):
            rows = rows[torch.randperm(len(rows), generator=generator)[:keep].to(device)]
        alive = torch.zeros_like(alive)
        alive[rows] = True
        anchors.append(rows)
    anchor = torch.cat(anchors)
    depths = torch.repeat_interleave(torch.tensor([len(rows) for rows in anchors], device=device))
    order = (anchor * len(weights) + depths).argsort()
    return MaskedRows(anchor[order], depths[order])


def visible_rows(rows: MaskedRows, first: int, count: int, head: DraftHead, whole: bool = False) -> Tensor:
    """What masked rows of one document attend to: [S, count + S] bool.

    The verified rows first .. first + count - 1 of the batch come before the masked rows themselves. whole: a row sees
    all of its own chain, and not only what is before it.
    """
    anchor, depth = rows
    keys = torch.arange(first, first + count, device=anchor.device)
    verified = (keys <= anchor[:, None]) & head.in_window(anchor + depth, keys)
    own_chain = anchor[:, None] == anchor
    if not whole:
        own_chain &= depth[:, None] >= depth
    return torch.cat([verified, own_chain], 1)


def attend_visible(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """query [1, h, S, D], key, value [1, g, n, D], visible [S, n] bool -> [1, h, S, D]."""
    if query.device.type == "cpu":
        return F.scaled_dot_product_attention(query, key, value, visible, enable_gqa=True)
    # Of torch's kernels for GPUs those that take a mask in float32 want a key and value for each query head. Without
    # them it would write the scores of all heads, [h, S, n], into memory.
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    return F.scaled_dot_product_attention(query, key, value, visible)


def repeat_heads(shared: Tensor, heads: int) -> Tensor:
    """[1, g, n, D] -> [1, heads, n, D]: a key or value for each query head."""
    return shared.repeat_interleave(heads // shared.shape[1], 1)


class SegmentAttention:
    """Attention of masked rows to verified ones and to their own chains, document by document."""

    def __init__(
        self, head: DraftHead, batch: Batch, rows: MaskedRows, first: int, end: int, whole: bool = False
    ) -> None:
        """The verified rows are first .. end - 1 of the batch; `first` begins a document. whole: as `visible_rows`."""
        documents = batch.document[rows.anchor]
        here = range(int(batch.document[first]), int(batch.document[end - 1]) + 1)
        edges = torch.searchsorted(documents, torch.arange(here.start, here.stop + 1, device=documents.device)).tolist()
        starts = [max(batch.bounds[i], first) for i in here] + [end]
        self._sizes = [b - a for a, b in zip(edges, edges[1:], strict=False)]
        self._context = [b - a for a, b in zip(starts, starts[1:], strict=False)]
        self._masks = [
            visible_rows(MaskedRows(rows.anchor[a:b], rows.depth[a:b]), start, count, head, whole) if b > a else None
            for a, b, start, count in zip(edges, edges[1:], starts, self._context, strict=False)
        ]

    def __call__(self, keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """keys, values [end - first, g, D] of verified rows; q [S, h, D], k, v [S, g, D] of masked -> [S, h, D]."""
        parts = [q[:0]]
        own = (part.split(self._sizes) for part in (q, k, v))
        verified = (part.split(self._context) for part in (keys, values))
        for visible, query, key, value, key_before, value_before in zip(self._masks, *own, *verified, strict=True):
            if visible is not None:
                key, value = torch.cat([key_before, key]), torch.cat([value_before, value])
                query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
                parts.append(attend_visible(query, key, value, visible)[0].transpose(0, 1))
        return torch.cat(parts)


class ParallelPass:
    """The forward of one batch: its verified rows, and what masked rows need of them."""

    def __init__(self, head: PEagleHead, batch: Batch, depths: int, dtype: torch.dtype) -> None:
        """Run the head on the verified rows. depths: 1 + the largest depth of a masked row."""
        assert batch.aux is not None
        self.head, self.batch = head, batch
        self.layers = [Layer(layer, dtype) for layer in head.layers]
        following = F.pad(batch.ids[1:], (0, 1))
        packing = Packing(batch.starts, head.window)
        x = fuse(head, batch.aux, dtype)
        self.table = RotaryTable(head, int(batch.starts.diff().max()) + depths, x)
        rotation = self.table.at(batch.positions)
        self.keys: list[Tensor] = []  # [N, g, D] per layer
        self.values: list[Tensor] = []

        def look(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys.append(k)
            self.values.append(v)
            return attend(packing, q, k, v, [], [], self.layers[0].scale)

        embedded = self.layers[0].read_embeddings(F.embedding(following, head.embedding).to(dtype))
        for i, layer in enumerate(self.layers):
            x = layer(x, embedded if i == 0 else None, rotation, look)
        self.states = next_hidden(head, x)  # [N, H] of depth 0
        # Masked rows differ in their positions only, so one row stands for all of them.
        self.mask = head.mask_state().to(dtype)
        token = head.embedding[head.mask_token_id].to(dtype)
        self.mask_embedded = self.layers[0].read_embeddings(token[None])

    def weights(self) -> list[Tensor]:
        """The tensors through which masked rows reach the head's parameters, beside `states`, `keys` and `values`."""
        found = [self.mask, *([] if self.mask_embedded is None else [self.mask_embedded])]
        for layer in self.layers:
            found += layer.weights()
        return found if self.head.norm is None else [*found, self.head.norm.weight]

    def draft_masked(self, rows: MaskedRows, first: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """The states [S, H] of masked rows, as `DraftHead.forward` gives them.

        keys, values: those of the verified rows from `first` on, [rows, g, D] per layer. They begin with a document and
        hold at least the rows that are attended to.
        """
        attention = SegmentAttention(self.head, self.batch, rows, first, first + len(keys[0]))
        rotation = self.table.at(self.batch.positions[rows.anchor] + rows.depth)
        x = self.mask
        for i, layer in enumerate(self.layers):
            x = layer(x, self.mask_embedded if i == 0 else None, rotation, partial(attention, keys[i], values[i]))
        return next_hidden(self.head, x)
