"""One rank of the test of `RankAgreement`: `agreeing_ranks.py RANK WORLD MEETING_FILE`; prints its rounds as JSON.

Every rank walks other paths of the same shapes; the answers of all rounds are printed after the last one.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, distributed

from eagle_plugin.core.verify import Accepted
from eagle_plugin.runtime.graph_emulator import EmulatedCapturer
from eagle_plugin.runtime.ranks import RankAgreement

MOST_REQUESTS, LONGEST = 6, 4
REPLAYS = 5
# Requests, and the most tokens of a path: shapes may change from one round to the next.
ROUNDS = [(3, 4), (1, 4), (1, 1), (6, 4), (1, 4), (2, 2)]


class Group:
    """What `RankAgreement` uses of the engine's group; counts the broadcasts."""

    def __init__(self) -> None:
        self.world_size = distributed.get_world_size()
        self.broadcasts = 0

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        assert tensor.dtype is torch.int32 and tensor.is_contiguous()
        self.broadcasts += 1
        distributed.broadcast(tensor, src)
        return tensor


def random_paths(rank: int, number: int, b: int, longest: int) -> Accepted:
    """Paths with ids up to 2^31 - 1, other ones in every rank and round."""
    random = torch.Generator().manual_seed(100 * rank + number)
    return Accepted(
        torch.randint(-1, 64, (b, longest), generator=random, dtype=torch.int32),
        torch.randint(1, longest + 1, (b,), generator=random, dtype=torch.int32),
        torch.randint(0, 2**31, (b, longest), generator=random),
    )


def as_lists(rounds: list[Accepted]) -> list[dict[str, Any]]:
    return [
        {name: [str(values.dtype), values.is_contiguous(), values.tolist()] for name, values in one._asdict().items()}
        for one in rounds
    ]


def captured_rounds(ranks: RankAgreement, rank: int) -> list[Accepted]:
    """Rounds of one shape, by an agreement that was captured once and is replayed."""
    paths = random_paths(rank, 0, MOST_REQUESTS, LONGEST)
    graph, agreed = EmulatedCapturer().capture(lambda: ranks.agree(paths))
    answers = []
    for number in range(REPLAYS):
        for memory, values in zip(paths, random_paths(rank, number, MOST_REQUESTS, LONGEST), strict=True):
            memory.copy_(values)
        graph.replay()
        answers.append(Accepted(*(values.clone() for values in agreed)))
    return answers


def main(rank: int, world: int, meeting: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    group = Group()
    ranks = RankAgreement(group, MOST_REQUESTS, LONGEST, "cpu")
    answers = [ranks.agree(random_paths(rank, number, *shape)) for number, shape in enumerate(ROUNDS)]
    report = {"answers": as_lists(answers), "broadcasts": group.broadcasts}
    print(json.dumps(report | {"captured": as_lists(captured_rounds(ranks, rank))}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
