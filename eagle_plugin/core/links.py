"""First-child / next-sibling links of a draft tree, the form in which engines walk trees on the host."""

from __future__ import annotations

import torch
from torch import Tensor


def sibling_links(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first child and the next sibling of every node, each [b, W] int64, -1 where there is none.

    parents [b, W] int32, -1 for the root and for padding. Children of a node follow each other in node order.
    """
    width = parents.shape[1]
    nodes = torch.arange(width, device=parents.device)
    is_child = parents[:, None, :] == nodes[:, None]  # [b, parent, node]
    first_child = torch.where(is_child, nodes, width).amin(dim=2)
    is_later_sibling = (parents[:, None, :] == parents[:, :, None]) & (nodes > nodes[:, None])
    is_later_sibling &= (parents >= 0)[:, :, None]
    next_sibling = torch.where(is_later_sibling, nodes, width).amin(dim=2)
    return first_child.where(first_child < width, -1), next_sibling.where(next_sibling < width, -1)
