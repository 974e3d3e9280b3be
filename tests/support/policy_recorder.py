"""A policy that keeps what it is told of served rounds, and drafts to tell it of."""

from __future__ import annotations

import torch
from policy_world import device

from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.costs import CostModel
from eagle_plugin.policy.policy import Policy
from eagle_plugin.runtime.round import Drafts

CAPS = Shape(3, 2, 8)
CHAIN = Shape.chain(2)


class Recorder(Policy):
    """A policy that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(CAPS, CostModel(device(64)))
        self.told: list[tuple[object, ...]] = []

    def observe_sums(self, *args: object) -> None:
        self.told.append(("sums", *args))

    def observe_accepted(self, *args: object) -> None:
        self.told.append(("accepted", *args))

    def observe_time(self, *args: object) -> None:
        self.told.append(("time", *args))


def drafts_of(shape: Shape, b: int, sampled: int = 0) -> Drafts:
    scores = torch.randn(
        b, (1 + shape.draft_slots) * (shape.topk + sampled), generator=torch.Generator().manual_seed(b)
    )
    return Drafts.plain(torch.zeros(b))._replace(shape=shape, scores=-scores.abs())
