"""One rank of the test of `SharedTimes`: `sharing_ranks.py RANK WORLD MEETING_FILE SHARES`; prints its shapes as JSON.

Rounds of 8 requests; those that draft take 1.5 times what the tables say, by which drafts are best. Rank 0 has a clock.
"""

from __future__ import annotations

import json
import sys

from policy_world import MIDDLE, device, tree_sums
from torch import distributed

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.costs import CostModel
from eagle_plugin.policy.policy import Policy
from eagle_plugin.policy.round_times import HostClock
from eagle_plugin.policy.served_rounds import ServedRound
from eagle_plugin.runtime.shared_times import SharedTimes

CAPS, REQUESTS, ROUNDS = Shape(4, 4, 16), 8, 400


class Group:
    """What `SharedTimes` uses of the engine's group."""

    def __init__(self) -> None:
        self.rank_in_group = distributed.get_rank()
        self.cpu_group = distributed.group.WORLD


def served_shapes(rank: int, shares: bool) -> list[Shape]:
    """The shapes that this rank's chooser gives its rounds."""
    costs, now = device(12), 0.0
    chooser = ShapeChooser(
        CAPS,
        Policy(CAPS, CostModel(costs)),
        clock=HostClock(lambda: now) if rank == 0 else None,
        learns_late=True,
        share=SharedTimes(Group()) if shares else None,
    )
    shapes = []
    for _ in range(ROUNDS):
        shape = chooser.choose(REQUESTS, 0)
        chooser.begin(shape, REQUESTS, 0)
        shapes.append(shape)
        reached = [round(REQUESTS * chance) for chance in tree_sums(shape, MIDDLE)]
        chooser.observe(ServedRound(shape, REQUESTS, 0), [sum(i < n for n in reached) for i in range(REQUESTS)])
        now += costs.round(shape, REQUESTS, 0) * (1.0 if shape == PLAIN else 1.5)
    return shapes


def main(rank: int, world: int, meeting: str, shares: bool) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    print(json.dumps(served_shapes(rank, shares)))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "1")
