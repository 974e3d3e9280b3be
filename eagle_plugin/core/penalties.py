"""Penalties after every node of a draft tree: the tokens on the path to a node count as generated there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Penalties(NamedTuple):
    """Tables with a row for each of P requests: what was generated, how strongly that is penalised, minimal lengths."""

    counts: Tensor  # [P, V] int32: how often the request has generated each token, the root of its next tree included
    frequency: Tensor  # [P] float32, 0 is off
    presence: Tensor  # [P] float32, 0 is off
    repetition: Tensor  # [P] float32, 1 is off
    stops: Tensor  # [P, S] int64: the tokens that end the request; -1 in unused places
    min_lens: Tensor  # [P] int64: no stop token may follow a node at a position below this; 0 is off


def penalize_nodes(
    logits: Tensor, tokens: Tensor, ancestors: Tensor, depths: Tensor, rows: Tensor, lengths: Tensor, p: Penalties
) -> None:
    """Penalise the logits after every node of b trees, in place, as SGLang's penalizers do after one token.

    logits [b * W, V] float32, row i * W + j after node j of request i; tokens [b, W] int64, ancestors [b, W] int64 and
    depths [b, W] int32 as in `DraftTree`; rows [b] int64: the row of request i in the tables; lengths [b] int64: the
    position L of its root.

    At node j a token counts n times: as often as the table says, and as often as it is on the path to j without the
    root, which the table holds already. Where n > 0, frequency * n + presence is subtracted from the logit, and the
    rest is multiplied by repetition if it is below 0, else divided by it. Then the stop tokens become -inf after nodes
    whose position L + depth is below min_lens. Tokens outside the vocabulary are ignored. The logits of requests whose
    strengths are all off stay as they are, bit for bit.
    """
    b, width = tokens.shape
    vocabulary, nodes = logits.shape[1], logits.unflatten(0, (b, width))
    on_path = ancestors[:, :, None] >> torch.arange(width, device=tokens.device) & 1  # [b, W, W]: (node, ancestor)
    on_path[:, :, 0] = 0  # the root is in the counts
    on_path *= ((tokens >= 0) & (tokens < vocabulary))[:, None]
    times = p.counts[rows][:, None].repeat(1, width, 1)
    times.scatter_add_(2, tokens.clamp(0, vocabulary - 1)[:, None].expand(-1, width, -1), on_path.int())

    frequency, presence, repetition = (x[rows][:, None, None] for x in (p.frequency, p.presence, p.repetition))
    lowered = nodes - (frequency * times.float() + presence)
    lowered = torch.where(lowered < 0, lowered * repetition, lowered / repetition)
    off = (frequency == 0) & (presence == 0) & (repetition == 1)
    nodes.copy_(torch.where((times > 0) & ~off, lowered, nodes))

    stops = p.stops[rows]
    ends = torch.zeros(b, vocabulary + 1, dtype=torch.bool, device=tokens.device)  # the last column is dropped
    ends.scatter_(1, stops.where((stops >= 0) & (stops < vocabulary), vocabulary), True)
    early = lengths[:, None] + depths < p.min_lens[rows][:, None]
    nodes.masked_fill_(early[:, :, None] & ends[:, None, :-1], -torch.inf)


def count_tokens(counts: Tensor, rows: Tensor, tokens: Tensor, lengths: Tensor) -> None:
    """Count the tokens that a round yields, in place: counts[rows[i]][t] += 1 for each t of tokens[i, :lengths[i]].

    counts [P, V] int32, rows [b] int64, tokens [b, E] int64 and lengths [b] int32 as in `Accepted`. Rows may repeat.
    """
    yielded = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    counts.index_put_((rows[:, None], tokens.where(yielded, 0)), yielded.int(), accumulate=True)
