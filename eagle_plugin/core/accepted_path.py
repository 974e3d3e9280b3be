"""What the head and the next round read of the accepted paths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.verify import Accepted


class AcceptedPath(NamedTuple):
    """The accepted paths of b requests as rows; places after a path name the root's row."""

    rows: Tensor  # [b, E] int64: i * W + j for node j of request i
    positions: Tensor  # [b, E] int64: L + place on the path
    last: Tensor  # [b] int64: i * E + place of the last token of request i
    roots: Tensor  # [b] int64: that token, the next round's root


def read_path(accepted: Accepted, prefix_lens: Tensor, width: int) -> AcceptedPath:
    """Read the paths of trees of `width` nodes; prefix_lens [b] int64: L."""
    b, longest = accepted.index.shape
    device = accepted.index.device
    requests, places = torch.arange(b, device=device), torch.arange(longest, device=device)
    last = accepted.lengths.long().clamp(1, longest) - 1
    return AcceptedPath(
        accepted.index.long().clamp(min=0) + (requests * width)[:, None],
        prefix_lens[:, None] + places,
        requests * longest + last,
        accepted.tokens.gather(1, last[:, None])[:, 0],
    )
