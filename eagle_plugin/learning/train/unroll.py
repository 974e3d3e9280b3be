"""Training-time test: the K draft steps of every row at once (EAGLE-3, arXiv 2503.01840, section 3.2).

At step k row t takes the embedding of token t+1+k with its own state of step k-1 (the target's features at step 0), at
RoPE position t+k, and predicts token t+2+k. This equals a draft from every row t along the tokens of the data. EAGLE-2
is the same with one step; more are HASS (arXiv 2408.15766).

Letters in shapes: N rows of a batch, H hidden size.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.layers import RMSNorm
from eagle_plugin.learning.train.attention import Packing, attend
from eagle_plugin.learning.train.batches import Batch
from eagle_plugin.learning.train.layers import Layer, RotaryTable, cast, normalise


def fuse(head: DraftHead, aux: Tensor, dtype: torch.dtype) -> Tensor:
    """Aux hidden states [N, F], constants -> the head's first hidden states [N, H]."""
    weight: Tensor = head.fc.weight
    aux = aux.to(dtype)
    if head.input_norm is not None:
        aux = normalise(aux, head.input_norm.eps)
        if head.fc_norm is None:
            weight = weight * head.input_norm.weight
        else:  # which takes the RMS of what this norm returns
            aux = aux * head.input_norm.weight.to(dtype)
    if head.fc_norm is not None:
        norms = [norm for norm in head.fc_norm if isinstance(norm, RMSNorm)]
        weight = weight * torch.cat([norm.weight for norm in norms])
        aux = normalise(aux.unflatten(-1, (len(norms), -1)), norms[0].eps).flatten(-2)
    return F.linear(aux, weight.to(dtype), cast(head.fc.bias, dtype))


def next_hidden(head: DraftHead, x: Tensor) -> Tensor:
    """What the next draft step reads [N, H], from the last layer's output [N, H]."""
    return _final_norm(head, x) if head.norm_output else x


def lm_head_input(head: DraftHead, state: Tensor) -> Tensor:
    """What lm_head reads [N, H], from what `next_hidden` returned."""
    return state if head.norm is None or head.norm_output else _final_norm(head, state)


def _final_norm(head: DraftHead, x: Tensor) -> Tensor:
    assert head.norm is not None
    return normalise(x, head.norm.eps) * head.norm.weight.to(x.dtype)


def unroll(head: DraftHead, batch: Batch, steps: int, dtype: torch.dtype, noise: Tensor | None = None) -> list[Tensor]:
    """Run all draft steps of all rows.

    noise [N, H] is added to EAGLE-2's features. Returns one state [N, H] per step, as `DraftHead.forward` does. Rows
    whose tokens t+1 .. t+1+k leave the document hold meaningless values, which no other row reads.
    """
    embeds = F.embedding(batch.ids, head.embedding).to(dtype)
    layers = [Layer(layer, dtype) for layer in head.layers]
    table = RotaryTable(head, int(batch.starts.diff().max()) + steps, embeds)
    packing = Packing(batch.starts, head.window)
    if layers[0].embed is not None:  # the first layer reads the embedding
        assert batch.aux is not None
        hidden, bottom = fuse(head, batch.aux, dtype), None
        # The embedding's part is made once for all steps; a shift then turns token t into token t+1+k.
        embedded = layers[0].read_embeddings(embeds)
    else:  # fc reads the embedding, on the left of the hidden state
        hidden = batch.last.to(dtype)
        hidden = hidden if noise is None else hidden + noise.to(dtype)
        left, right = head.fc.weight.to(dtype).chunk(2, -1)
        embedded, bottom = F.linear(embeds, left, cast(head.fc.bias, dtype)), right

    causal: list[tuple[Tensor, Tensor]] = []  # keys and values of step 0, one pair per layer
    own: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in layers]
    states = []

    def look(i: int, step: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if step == 0:
            causal.append((k, v))
        else:
            own[i][0].append(k)
            own[i][1].append(v)
        return attend(packing, q, *causal[i], *own[i], layers[i].scale)

    for step in range(steps):
        rotation = table.at(batch.positions + step)
        shifted = _shift(embedded, step + 1)
        x = hidden if bottom is None else F.linear(hidden, bottom) + shifted
        for i, layer in enumerate(layers):
            x = layer(x, shifted if layer.embed is not None else None, rotation, partial(look, i, step))
        hidden = next_hidden(head, x)
        states.append(hidden)
    return states


def _shift(x: Tensor | None, by: int) -> Tensor:
    """Row t of the result is row t + by of x; zeros past the end. Rows of the next document only reach unused rows."""
    assert x is not None
    return F.pad(x[by:], (0, 0, 0, min(by, len(x))))
